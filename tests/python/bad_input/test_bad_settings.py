"""Settings with which the server refuses to start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import dovetail
from harness import Server, StartFailed
from refusals import is_unharmed

Start = Callable[..., Server]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"listen": "0.0.0.0:0"}, ["0.0.0.0", "--insecure"]),
        ({"admin_listen": "0.0.0.0:0"}, ["admin-listen 0.0.0.0", "metrics", "--insecure"]),
        ({"host_memory": "plenty"}, ["host-memory", "plenty", "GiB"]),
        ({"devices": "quantum:3"}, ["quantum:3", "host"]),
        ({"token_file": "/nowhere"}, ["/nowhere"]),
        ({"devices": "host:2", "topology": __file__}, ["--devices host:2", "leave one of them out"]),
        ({"no_such_setting": "1"}, ["no-such-setting"]),
        ({"arena_directory": "/nowhere"}, ["arena-directory", "/nowhere does not exist"]),
        ({"arena_directory": "/proc"}, ["arena-directory", "/proc is on a disk", "-t tmpfs -o huge=always,size="]),
        ({"arena_directory": __file__}, ["arena-directory", "is not a directory"]),
        ({"prefault": "lots"}, ["prefault", "auto, all, none, a size, or a share", '"lots"']),
        ({"prefault": "2GiB", "host_memory": "1GiB"}, ["prefault", "2GiB is more than the 1.0 GiB of", "host-memory"]),
        ({"tenant_memory": "5"}, ["tenant-memory", '"5" is 5 B', "none", "5GiB"]),
        ({"listen": "127.0.0.1:8815", "admin_listen": "127.0.0.1:8815"}, ["the same port"]),
        (
            {"listen": "0.0.0.0:8815", "insecure": True, "admin_listen": "127.0.0.1:8815"},
            ["--listen 0.0.0.0:8815 and --admin-listen 127.0.0.1:8815"],
        ),
    ],
)
def test_a_wrong_setting_stops_the_server_with_an_explanation(
    tmp_path: Path, settings: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(StartFailed) as caught:
        Server(tmp_path, **settings)
    assert caught.value.code in (1, 2)
    for word in words:
        assert word in caught.value.log, caught.value.log
    assert "panicked" not in caught.value.log


def test_a_non_loopback_address_is_served_with_the_insecure_setting(start: Start) -> None:
    server = start(listen="0.0.0.0:0", insecure=True, devices="host:1", host_memory="256MiB")
    port = server.address.rpartition(":")[2]
    with dovetail.connect(f"grpc://127.0.0.1:{port}") as client:
        is_unharmed(server, client)
