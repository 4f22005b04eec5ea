"""Large openings lie compressed; nothing about them is believed."""

import os

import pytest
from amends.store.errors import Malformed
from amends.store.squeeze import LEAST, MAGIC, shut, unshut
from hypothesis import given
from hypothesis import strategies as st


@given(st.binary(max_size=4000))
def test_what_is_shut_comes_back(blob: bytes) -> None:
    blob = b"[" + blob
    assert unshut(shut(blob)) == blob


def test_small_or_dense_openings_stay_plain() -> None:
    assert shut(b"[" + b"a" * (LEAST - 2)) == b"[" + b"a" * (LEAST - 2)
    dense = b"[" + os.urandom(4000)
    assert shut(dense) == dense
    assert shut(b"[" + b"a" * LEAST)[:4] == MAGIC


@pytest.mark.parametrize("hurt", [lambda c: c[:-1], lambda c: c + c, lambda c: c + b"x", lambda c: c[:8] + b"\xff" + c[9:]])
def test_a_cut_joined_or_altered_frame_is_refused(hurt) -> None:
    cell = shut(b"[" + b"abc" * 4000)
    with pytest.raises(Malformed):
        unshut(hurt(cell))


def test_a_bomb_is_refused_by_its_declared_size() -> None:
    import zstandard

    writer = zstandard.ZstdCompressor(level=1).compressobj(size=1 << 30)
    bomb = writer.compress(b"\0" * (1 << 20)) + writer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    with pytest.raises(Malformed, match="size"):
        unshut(bomb)


def test_an_undeclared_size_is_refused() -> None:
    import zstandard

    cell = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(b"[" + b"a" * 4000)
    with pytest.raises(Malformed, match="size"):
        unshut(cell)
