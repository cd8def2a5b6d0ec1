"""Bytes that are nearly right: what a fuzzer makes of an input that is."""

from random import Random

_PIECES = (
    *(bytes([one]) for one in b'{}[]":,\\\n=#\x00\xff'),
    b"\\u0000", b"\\ud800", b"\\udfff", b"\xc0\x80", b'""', b"{}", b"[]", b"{{", b"}}", b"{%", b"'''", b"[[", b"]]",
    b"null", b"true", b"-1", b"0", b"1e999", b"-0.0", b"NaN", b"9223372036854775808", b"18446744073709551616",
    b"0.1e-5", b" " * 40, "\u202e".encode(), "\U0001f600".encode(), "\u0663".encode(),
    b'"id"', b'"job"', b'"task"', b'"fields"', b'"messages"', b'"prompt"', b'"prompt_token_ids"', b'"sampling"',
    b'"stop"', b'"deadline"', b'"metadata"', b'"priority"', b'"schema_version"',
)  # fmt: skip
_MAX_NESTED = 300


def mutated(content: bytes, random: Random) -> bytes:
    """The same with one to four changes: a bit, a piece in, out, twice, moved or replaced, the end cut, a deep nest."""
    for _ in range(random.choice((1, 1, 1, 2, 2, 3, 4))):
        content = _changed(content, random)
    return content


def _changed(content: bytes, random: Random) -> bytes:
    at = random.randrange(len(content) + 1)
    end = min(len(content), at + random.choice((1, 1, 2, 4, 8, 16, 64)))
    match random.randrange(9):
        case 0 if at < len(content):
            return content[:at] + bytes([content[at] ^ (1 << random.randrange(8))]) + content[at + 1 :]
        case 1:
            return content[:at] + random.choice(_PIECES) + content[at:]
        case 2:
            return content[:at] + random.choice(_PIECES) + content[end:]
        case 3:
            return content[:at] + content[end:]
        case 4:
            return content[:end] + content[at:]
        case 5:
            return content[:at]
        case 6:
            to = random.randrange(len(content) + 1)
            rest = content[:at] + content[end:]
            return rest[:to] + content[at:end] + rest[to:]
        case 7:
            depth = random.randrange(_MAX_NESTED)
            opening, closing = random.choice(((b"[", b"]"), (b'{"a":', b"}")))
            return content[:at] + opening * depth + content[at:end] + closing * depth + content[end:]
        case _:
            return content[:at] + random.randbytes(end - at) + content[end:]
