"""Large openings lie compressed; nothing about them is believed."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from amends.store.errors import Malformed
from amends.store.squeeze import LEAST, MAGIC, _sealed, shut, unshut


@given(st.binary(max_size=4000))
def test_what_is_shut_comes_back(blob: bytes) -> None:
    blob = b"[" + blob
    assert unshut(shut(blob)) == blob


def test_small_or_dense_openings_stay_plain() -> None:
    assert shut(b"[" + b"a" * (LEAST - 2)) == b"[" + b"a" * (LEAST - 2)
    dense = b"[" + os.urandom(4000)
    assert shut(dense) == dense
    assert shut(b"[" + b"a" * LEAST)[:4] == MAGIC


@pytest.mark.parametrize(
    "hurt",
    [lambda c: c[:-1], lambda c: c + c, lambda c: c + b"x", lambda c: c[:8] + b"\xff" + c[9:], lambda c: c[:-12]],
)
def test_a_cut_joined_or_altered_cell_is_refused(hurt: Callable[[bytes], bytes]) -> None:
    cell = shut(b"[" + b"abc" * 4000)
    with pytest.raises(Malformed):
        unshut(hurt(cell))


def test_joined_frames_under_a_good_seal_are_refused() -> None:
    frame = shut(b"[" + b"abc" * 4000)[:-12]
    with pytest.raises(Malformed, match="more than one"):
        unshut(_sealed(frame + frame))


def test_every_flipped_bit_of_a_cell_is_noticed_even_where_a_decoder_would_not_mind() -> None:
    """A bit that turns the cell into a plain one is left to the commitment."""
    draw = random.Random(7)
    cell = shut(b"[" + bytes(draw.choice(b"abcdefgh \n") for _ in range(3000)))
    for bit in range(len(cell) * 8):
        hurt = bytearray(cell)
        hurt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Malformed):
            unshut(bytes(hurt))


def test_a_cell_is_read_by_any_zstd_as_it_is() -> None:
    import io

    import zstandard

    blob = b"[" + b"abc" * 4000
    reader = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(shut(blob)), read_across_frames=True)
    assert reader.read() == blob


def test_a_bomb_is_refused_by_its_declared_size() -> None:
    import zstandard

    writer = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
    bomb = writer.compress(b"\0" * (1 << 20)) + writer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    with pytest.raises(Malformed, match="size"):
        unshut(_sealed(bomb))


def test_an_undeclared_size_is_refused() -> None:
    import zstandard

    frame = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(b"[" + b"a" * 4000)
    with pytest.raises(Malformed, match="size"):
        unshut(_sealed(frame))
