"""Calls to roles: real sockets, hostile frames, deadlines."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miles.errors import RoleDiedError, RoleError
from miles.ports import listen
from miles.rpc import (
    HELLO_TIMEOUT_S,
    MAX_BUFFER_BYTES,
    MAX_HEADER_BYTES,
    Buffers,
    Frame,
    FrameError,
    RoleClient,
    parse_header,
    parse_prefix,
    serve_calls,
)


def frame(header: bytes) -> bytes:
    return b"MRP1" + struct.pack("<I", len(header)) + header


def echo(arguments: Mapping[str, Any], buffers: Buffers) -> tuple[Mapping[str, Any], Buffers]:
    return {"arguments": dict(arguments)}, buffers[::-1]


class Coded(ValueError):
    code = "odd"


def fail(arguments: Mapping[str, Any], buffers: Buffers) -> tuple[Mapping[str, Any], Buffers]:
    raise Coded("it is odd")


RELEASE = threading.Event()


def hang(arguments: Mapping[str, Any], buffers: Buffers) -> tuple[Mapping[str, Any], Buffers]:
    RELEASE.wait(20)
    return {}, ()


@pytest.fixture
def port() -> Iterator[int]:
    RELEASE.clear()
    with listen() as listener:
        thread = threading.Thread(
            target=serve_calls, args=(listener, "secret", {"echo": echo, "fail": fail, "hang": hang}), daemon=True
        )
        thread.start()
        number = listener.getsockname()[1]
        yield number
        RELEASE.set()

        async def end() -> None:
            client = RoleClient("role", "127.0.0.1", number, "secret")
            await client.call("shutdown", timeout_s=5)
            await client.aclose()

        asyncio.run(end())
        thread.join(5)
        assert not thread.is_alive()


async def test_arguments_and_buffers_travel_both_ways(port: int) -> None:
    client = RoleClient("role", "127.0.0.1", port, "secret")
    result, buffers = await client.call("echo", {"a": [1, "ü"]}, [b"one", b"", b"\x00" * 100_000], timeout_s=5)
    assert result == {"arguments": {"a": [1, "ü"]}}
    assert buffers == (b"\x00" * 100_000, b"", b"one")
    await client.aclose()


async def test_a_failed_call_names_the_role_and_its_code_and_the_next_one_works(port: int) -> None:
    client = RoleClient("role", "127.0.0.1", port, "secret")
    with pytest.raises(RoleError, match="role: it is odd") as raised:
        await client.call("fail", timeout_s=5)
    assert raised.value.code == "odd"
    with pytest.raises(RoleError, match="no call 'nothing'"):
        await client.call("nothing", timeout_s=5)
    assert (await client.call("echo", timeout_s=5))[0] == {"arguments": {}}
    await client.aclose()


async def test_a_wrong_token_is_refused(port: int) -> None:
    with pytest.raises(RoleError, match="wrong token"):
        await RoleClient("role", "127.0.0.1", port, "guess").call("echo", timeout_s=5)


async def test_a_role_that_does_not_answer_in_time_is_named(port: int) -> None:
    client = RoleClient("role", "127.0.0.1", port, "secret")
    with pytest.raises(RoleDiedError, match=r"no answer to 'hang' within 0.2 s"):
        await client.call("hang", timeout_s=0.2)
    RELEASE.set()


async def test_garbage_on_the_port_harms_nobody(port: int) -> None:
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"MRP1" + struct.pack("<I", 0xFFFFFFFF),
        frame(b"[]"),
        frame(b'"text"'),
        frame(b"[" * 4000),
        frame(b'{"token": "x", "buffers": [1e999]}'),
        frame(b'{"token": "x", "buffers": [true]}'),
        frame(b'{"token": "x", "buffers": 3}'),
        # a stranger may not make the role set memory aside
        frame(b'{"token": "x", "buffers": [%d]}' % (1 << 20)),
        b"MRP1" + struct.pack("<I", MAX_HEADER_BYTES),
    ):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(garbage)
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
    client = RoleClient("role", "127.0.0.1", port, "secret")
    assert (await client.call("echo", timeout_s=5))[0] == {"arguments": {}}
    await client.aclose()


@pytest.mark.parametrize("token", ["é", "\\ud800", ""])
async def test_a_token_of_any_text_is_refused_and_harms_nobody(port: int, token: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(frame(b'{"token": "%s", "buffers": []}' % token.encode()))
    assert b"unauthorized" in await reader.read()
    writer.close()
    client = RoleClient("role", "127.0.0.1", port, "secret")
    assert (await client.call("echo", timeout_s=5))[0] == {"arguments": {}}
    await client.aclose()


async def test_a_stranger_that_says_nothing_does_not_keep_the_driver_out(port: int) -> None:
    _, silent = await asyncio.open_connection("127.0.0.1", port)
    client = RoleClient("role", "127.0.0.1", port, "secret")
    assert (await client.call("echo", timeout_s=HELLO_TIMEOUT_S + 10))[0] == {"arguments": {}}
    await client.aclose()
    silent.close()


async def test_an_answer_that_is_no_frame_names_the_role() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(RoleDiedError, match="role: answered 'echo' with expected a frame"):
            await RoleClient("role", "127.0.0.1", port, "secret").call("echo", timeout_s=5)


def test_sizes_are_checked_before_anything_is_allocated() -> None:
    with pytest.raises(FrameError, match="outside the limit"):
        parse_header(b'{"buffers": [%d]}' % (MAX_BUFFER_BYTES + 1))
    with pytest.raises(FrameError, match="outside the limit"):
        parse_header(b'{"buffers": [-1]}')


@given(st.dictionaries(st.text(max_size=5), st.integers()), st.lists(st.binary(max_size=20), max_size=4))
def test_frames_round_trip(header: dict[str, int], buffers: list[bytes]) -> None:
    header.pop("buffers", None)
    data = Frame(header, tuple(buffers)).encode()
    length = parse_prefix(data[:8])
    parsed, sizes = parse_header(data[8 : 8 + length])
    assert parsed == header
    assert sizes == [len(buffer) for buffer in buffers]
    assert data[8 + length :] == b"".join(buffers)
