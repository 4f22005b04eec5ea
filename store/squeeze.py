"""Large openings lie compressed in the file; what is committed to, disclosed and shown is the plain bytes.

A compressed cell is one zstd frame that states its plain size, and a skippable frame that holds the frame's CRC-32:
`zstd -d` reads it as it is. A plain cell starts with `[`. The CRC finds the bits of a frame that a decoder overlooks
(an unused flag, the padding of a table); the size is checked before anything is allocated; the commitment decides
about the bytes: the decoder is never trusted.
"""

from __future__ import annotations

from binascii import crc32

from .errors import Malformed

MAGIC = b"\x28\xb5\x2f\xfd"
SEAL = b"\x50\x2a\x4d\x18\x04\x00\x00\x00"  # a skippable frame of four bytes: the CRC-32, little-endian
LEAST = 1024
MOST = 96 * 1024 * 1024
"""Plain bytes of one cell: 32 openings at the very most."""


def shut(blob: bytes) -> bytes:
    """The cell for opening lines: compressed from 1 KiB on, where that is smaller."""
    if len(blob) < LEAST:
        return blob
    frame = framed(blob)
    return _sealed(frame) if len(frame) + len(SEAL) + 4 < len(blob) else blob


def framed(blob: bytes) -> bytes:
    """One zstd frame that states its plain size."""
    import zstandard

    return zstandard.ZstdCompressor(level=1, write_content_size=True).compress(blob)


def _sealed(frame: bytes) -> bytes:
    return frame + SEAL + crc32(frame).to_bytes(4, "little")


def unshut(cell: bytes) -> bytes:
    """The opening lines in a cell. Raises Malformed (E_OPENING) for one that was altered, or is too large."""
    if cell[:1] in (b"[", b""):
        return cell
    frame = cell[: -len(SEAL) - 4]
    if cell[:4] != MAGIC or _sealed(frame) != cell:
        raise _unreadable("it is not what was written")
    return unframed(frame)


def unframed(frame: bytes) -> bytes:
    """What one frame holds. Raises Malformed (E_OPENING) for one that is cut, or too large."""
    import zstandard

    try:
        size = zstandard.frame_content_size(frame)
        if not 0 <= size <= MOST:
            raise _unreadable("it does not state a size that is allowed")
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        plain = reader.decompress(frame)
    except zstandard.ZstdError as error:
        raise _unreadable(str(error)) from None
    if len(plain) != size or reader.unused_data or not reader.eof:
        raise _unreadable("it is cut, or more than one frame")
    return plain


def _unreadable(why: str) -> Malformed:
    return Malformed(f"An opening cannot be read from its place in the file: {why}.", finding="E_OPENING")
