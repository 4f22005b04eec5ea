"""Large openings lie compressed in the file; what is committed to, disclosed and shown is the plain bytes.

A cell that starts with zstd's magic is one frame that states its plain size; a plain one starts with `[`. The size is
checked before anything is allocated, and the commitment decides about the bytes: the decoder is never trusted.
"""

from __future__ import annotations

from .errors import Malformed

MAGIC = b"\x28\xb5\x2f\xfd"
LEAST = 1024
MOST = 96 * 1024 * 1024
"""Plain bytes of one cell: 64 MiB of value, as text and with its salts."""


def shut(blob: bytes) -> bytes:
    """The cell for opening lines: compressed from 1 KiB on, where that is smaller."""
    if len(blob) < LEAST:
        return blob
    import zstandard

    packed = zstandard.ZstdCompressor(level=1, write_checksum=True, write_content_size=True).compress(blob)
    return packed if len(packed) < len(blob) else blob


def unshut(cell: bytes) -> bytes:
    """The opening lines in a cell. Raises Malformed (E_OPENING) for a frame that is cut, joined, or too large."""
    if cell[:4] != MAGIC:
        return cell
    import zstandard

    try:
        size = zstandard.frame_content_size(cell)
        if not 0 <= size <= MOST:
            raise Malformed("A compressed opening does not state a size that is allowed.", finding="E_OPENING")
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        plain = reader.decompress(cell)
    except zstandard.ZstdError as error:
        raise Malformed(f"A compressed opening cannot be read: {error}.", finding="E_OPENING") from None
    if len(plain) != size or reader.unused_data or not reader.eof:
        raise Malformed("A compressed opening is cut, or more than one frame.", finding="E_OPENING")
    return plain
