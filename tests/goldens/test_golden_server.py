"""`tessellm serve` replies as it did when the goldens were recorded, over HTTP, but for what data/changed_replies.json
says was changed since."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from golden_compare import differences
from golden_files import DATA, read
from server_goldens import changed, exchange, server

CHANGES = json.loads((DATA / "changed_replies.json").read_text())
pytestmark = pytest.mark.xdist_group("golden server")


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with server(tmp_path_factory.mktemp("served")) as started:
        yield started


def test_every_reply_is_as_recorded(running: Any) -> None:
    """In order: the last request asks for the numbers of all."""
    assert all(change["why"] for change in CHANGES)
    wrong = []
    for number, asked in enumerate(changed(read("exchanges.json.gz")["exchanges"], CHANGES)):
        place = f"{number}: {asked['method']} {asked['path']} {str(asked.get('json', ''))[:100]}"
        wrong += differences(asked.pop("reply"), exchange(running, asked), place)
    assert not wrong, "\n".join(wrong)
