"""OSS's errors: code, HTTP status, the usual message, and the extra fields each one carries."""

from collections.abc import Mapping

# code -> (HTTP status, message)
CODES: Mapping[str, tuple[int, str]] = {
    "AccessDenied": (403, "You have no right to access this object because of bucket acl."),
    "BucketAlreadyExists": (409, "The requested bucket name is not available."),
    "BucketNotEmpty": (409, "The bucket you tried to delete is not empty."),
    "EntityTooSmall": (400, "Your proposed upload smaller than the minimum allowed size."),
    "EntityTooLarge": (400, "Your proposed upload exceeds the maximum allowed size."),
    "FileAlreadyExists": (409, "The object you specified already exists and can not be overwritten."),
    "InternalError": (500, "We encountered an internal error. Please try again."),
    "InvalidAccessKeyId": (403, "The OSS Access Key Id you provided does not exist in our records."),
    "InvalidArgument": (400, "Invalid Argument."),
    "InvalidBucketName": (400, "The specified bucket is not valid."),
    "InvalidDigest": (400, "The Content-MD5 you specified was invalid."),
    "InvalidEncryptionAlgorithmError": (400, "The Encryption request you specified is not valid."),
    "InvalidObjectName": (400, "The specified object is not valid."),
    "InvalidPart": (
        400,
        "One or more of the specified parts could not be found or the specified entity tag might not have matched.",
    ),
    "InvalidPartOrder": (400, "The list of parts was not in ascending order."),
    "InvalidRange": (416, "The requested range cannot be satisfied"),
    "InvalidSecurityToken": (403, "The security token you provided is invalid."),
    "MalformedXML": (400, "The XML you provided was not well-formed or did not validate against our published schema."),
    "MethodNotAllowed": (405, "The specified method is not allowed against this resource."),
    "MissingContentLength": (411, "You must provide the Content-Length HTTP header."),
    "NoSuchBucket": (404, "The specified bucket does not exist."),
    "NoSuchKey": (404, "The specified key does not exist."),
    "NoSuchUpload": (
        404,
        "The specified upload does not exist. The upload ID may be invalid, or the upload may have been aborted.",
    ),
    "NotImplemented": (501, "A header or a parameter you provided implies functionality that is not implemented."),
    "NotModified": (304, "Not Modified"),
    "ObjectNotAppendable": (409, "The object is not appendable"),
    "PositionNotEqualToLength": (409, "Position is not equal to file length"),
    "PreconditionFailed": (412, "At least one of the pre-conditions you specified did not hold."),
    "RequestTimeTooSkewed": (403, "The difference between the request time and the current time is too large."),
    "SecurityTokenExpired": (403, "The security token you provided has expired."),
    "ServiceUnavailable": (503, "Please reduce your request rate."),
    "SignatureDoesNotMatch": (
        403,
        "The request signature we calculated does not match the signature you provided. "
        "Check your key and signing method.",
    ),
    "TotalQpsLimitExceeded": (503, "Please reduce your request rate."),
}


class OssError(Exception):
    """A request that OSS would refuse.

    Args:
        code: OSS's error code, such as ``NoSuchKey``.
        message: text for the reader; the usual one of that code when empty.
        status: HTTP status; the usual one of that code when None (500 for a code not in ``CODES``).
        headers: reply headers beyond the usual ones.
        details: extra fields of the XML body, in order.
        more_details: the same, for names that Python takes: ``Key="a"`` becomes ``<Key>a</Key>``.
    """

    def __init__(
        self,
        code: str,
        message: str = "",
        *,
        status: int | None = None,
        headers: Mapping[str, str] | None = None,
        details: Mapping[str, str] | None = None,
        **more_details: str,
    ) -> None:
        usual_status, usual_message = CODES.get(code, (500, code))
        self.code = code
        self.message = message or usual_message
        self.status = usual_status if status is None else status
        self.headers = dict(headers or {})
        self.details = {**(details or {}), **more_details}
        super().__init__(f"{code}: {self.message}")


def invalid_argument(message: str, name: str, value: str) -> OssError:
    """Return the error for a parameter or header ``name`` whose ``value`` OSS does not take."""
    return OssError("InvalidArgument", message, ArgumentName=name, ArgumentValue=value)
