"""What a sample consists of in a shard, and how many bytes that takes in each format."""

from __future__ import annotations

import re
from json.encoder import encode_basestring_ascii as quoted

BLOCK = 512
# The size field of a USTAR header holds eleven octal digits; a PAX record carries a larger size.
USTAR_MAX = 8**11 - 1
RESERVED = ("cls", "json")
# One record for each of three members; the label's data takes one block more.
_TAR_FIXED = 4 * BLOCK
_SAFE_EXT = re.compile(r"[a-z0-9_+-]{1,16}").fullmatch
_LMDB_PAGE = 4096
# A value up to this size lies in a leaf page beside others; a longer one has pages of its own.
_LMDB_INLINE = 2040
_LMDB_NODE = 18


def member_ext(path: str) -> str:
    """Member extension of a source file: the last one, in lower case, if it is safe in every tool.

    ``member_ext("Track 2.0 (Clean).MP3") == "mp3"``; a file without one, or with a strange one, becomes
    ``bin``; ``.json`` and ``.cls``, which each sample has of its own, become ``data.json`` and ``data.cls``.
    """
    head, dot, last = path.rpartition("/")[2].rpartition(".")
    ext = last.lower() if dot and head else ""
    if not _SAFE_EXT(ext):
        return "bin"
    return f"data.{ext}" if ext in RESERVED else ext


def sample_json(path: str, label: str | None, label_index: int, ext: str) -> bytes:
    r"""The ``.json`` member: ASCII; path bytes that are no UTF-8 are lone surrogates (``\udc80``)."""
    where = quoted(path)
    name = "null" if label is None else quoted(label)
    text = f'{{"path":{where},"label":{name},"label_index":{label_index},"parts":{{"{ext}":{where}}}}}'
    return text.encode("ascii")


def label_block(label_index: int) -> bytes:
    """The ``.cls`` member: the label index as decimal text; ``-1`` without a label."""
    return b"%d" % label_index


def padded(size: int) -> int:
    """Bytes that data takes in a tar: whole records of 512."""
    return (size + BLOCK - 1) & -BLOCK


def tar_bytes(size: int, json_size: int) -> int:
    """Bytes of one sample in a tar, headers and padding counted."""
    large = 2 * BLOCK if size > USTAR_MAX else 0
    return _TAR_FIXED + padded(size) + padded(json_size) + large


def value_bytes(size: int, json_size: int, ext: str, label_size: int) -> int:
    """Bytes of one LMDB value: three parts, each with its name's length, its name and its own length."""
    return 3 * 9 + len(ext) + 3 + 4 + size + json_size + label_size


def page_bytes(value_size: int) -> int:
    """Bytes that one value takes in an LMDB file, as pages."""
    if value_size + _LMDB_NODE <= _LMDB_INLINE:
        return value_size + _LMDB_NODE
    return -(-(value_size + 16) // _LMDB_PAGE) * _LMDB_PAGE + 2 * _LMDB_NODE
