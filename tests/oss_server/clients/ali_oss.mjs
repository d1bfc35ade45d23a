// Calls of npm's ali-oss, unchanged, against the server of the environment; prints results as JSON.
import { Buffer } from 'node:buffer';
import { createRequire } from 'node:module';
import { join } from 'node:path';

// The package lies in a folder of its own, not beside this file.
const require = createRequire(join(process.env.OSS_NODE_ENV, 'package.json'));
const OSS = require('ali-oss');

const PART = 100 * 1024;
const bucket = process.env.OSS_BUCKET;

// For an IP address the package puts bucket.oss-<region>.aliyuncs.com into the Host header; for a name and sldEnable
// it puts the bucket into the path. Version 1 is tried the first way, version 4 the second.
function makeClient(secret, v4, named = v4) {
  const endpoint = process.env.OSS_ENDPOINT;
  return new OSS({
    bucket,
    endpoint: named ? endpoint.replace('127.0.0.1', 'localhost') : endpoint,
    region: `oss-${process.env.OSS_REGION}`,
    accessKeyId: process.env.OSS_KEY_ID,
    accessKeySecret: secret,
    authorizationV4: v4,
    sldEnable: named,
  });
}

async function codeOf(promise) {
  try {
    await promise;
    return 'no error';
  } catch (error) {
    return error.code;
  }
}

async function calls(v4) {
  const client = makeClient(process.env.OSS_SECRET, v4);
  const key = 'js/a b+中.bin';
  await client.put(key, Buffer.from('0123456789'), { meta: { step: '3' }, headers: { 'Content-Type': 'text/x-js' } });
  const got = await client.get(key);
  const head = await client.head(key);
  const ranged = await client.get(key, { headers: { Range: 'bytes=2-4' } });
  const forbid = { headers: { 'x-oss-forbid-overwrite': 'true' } };
  const data = Buffer.alloc(PART * 3 + 7, 'abcdefg');
  await client.multipartUpload('js/big', data, { partSize: PART, parallel: 2 });
  const big = await client.get('js/big');
  await client.copy('js/copy', key);
  await client.append('js/log', Buffer.from('abc'));
  const appended = await client.append('js/log', Buffer.from('de'), { position: '3' });
  await client.putObjectTagging(key, { stage: 'best' });
  const byName = makeClient(process.env.OSS_SECRET, v4, true); // it signs no URL for an IP address
  const url = v4 ? await byName.signatureUrlV4('GET', 60, {}, key) : byName.signatureUrl(key, { expires: 60 });
  const results = {
    body: got.content.toString(),
    contentType: got.res.headers['content-type'],
    meta: head.meta,
    range: ranged.content.toString(),
    big: Buffer.compare(big.content, data) === 0,
    copy: (await client.get('js/copy')).content.toString(),
    append: appended.nextAppendPosition,
    tag: (await client.getObjectTagging(key)).tag,
    presigned: await (await fetch(url)).text(),
    forbidden: await codeOf(client.put(key, Buffer.from('x'), forbid)),
    absent: await codeOf(client.get('js/none')),
    stranger: await codeOf(makeClient('guessed', v4).get(key)),
    listed: (await client.list({ prefix: 'js/', 'max-keys': 10 })).objects.map((object) => object.name),
    listedV2: (await client.listV2({ prefix: 'js/', 'max-keys': 10 })).objects.map((object) => object.name),
    info: (await client.getBucketInfo(bucket)).bucket.Name === bucket,
    // By IP address the package asks the host undefined.oss-<region>.aliyuncs.com.
    buckets: v4 ? (await client.listBuckets()).buckets.map((found) => found.name).includes(bucket) : true,
  };
  await client.deleteMulti([key, 'js/big', 'js/copy', 'js/log']);
  results.left = (await client.list({ prefix: 'js/' })).objects?.length ?? 0;
  return results;
}

process.stdout.write(JSON.stringify({ v1: await calls(false), v4: await calls(true) }));
