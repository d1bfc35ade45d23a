"""CRC-64 as OSS computes it (ECMA-182, reflected), running and combined."""

from functools import lru_cache

import crcmod

_POLYNOMIAL = 0x142F0E1EBA9EA3693
_ALL_ONES = 0xFFFFFFFFFFFFFFFF
_REFLECTED = 0xC96C5795D7870F42
_ONE = 1 << 63  # reflected: the highest bit is x^0

_crc = crcmod.mkCrcFun(_POLYNOMIAL, initCrc=0, rev=True, xorOut=_ALL_ONES)


def update(crc: int, data: bytes) -> int:
    """Return the CRC of what ``crc`` stands for followed by ``data``; start with 0."""
    return int(_crc(data, crc))


def combine(first: int, second: int, second_size: int) -> int:
    """Return the CRC of two pieces laid end to end.

    Args:
        first: CRC of the first piece.
        second: CRC of the second piece.
        second_size: length of the second piece in bytes.
    """
    return _multiply(first, _power_of_x(8 * second_size)) ^ second


def _multiply(left: int, right: int) -> int:
    """Multiply two polynomials over GF(2), modulo OSS's polynomial."""
    product = 0
    while left:
        if left & _ONE:
            product ^= right
        left = (left << 1) & _ALL_ONES
        right = (right >> 1) ^ _REFLECTED if right & 1 else right >> 1
    return product


@lru_cache(maxsize=1024)
def _power_of_x(exponent: int) -> int:
    result, square = _ONE, _ONE >> 1
    while exponent:
        if exponent & 1:
            result = _multiply(result, square)
        square = _multiply(square, square)
        exponent >>= 1
    return result
