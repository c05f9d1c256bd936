from __future__ import annotations

import stat
import threading
import time
import uuid
from pathlib import Path

import pytest

from sparkvod.observe import mailbox
from sparkvod.observe.mailbox import Mailbox


@pytest.fixture(params=["local", "objects"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    pytest.importorskip("fsspec", reason="fsspec is not installed")
    return str(tmp_path / "box") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def test_events_come_once_in_order_with_rank_and_time(url: str) -> None:
    reader = Mailbox(url)
    assert reader.read_new() == []
    reader.create()
    reader.create()
    writers = [Mailbox(url) for _ in range(2)]
    for step in range(3):
        for rank, writer in enumerate(writers):
            writer.post(rank, "progress", step=step)
    for writer in writers:
        writer.close()
    events = reader.read_new()
    assert [(e["rank"], e["step"]) for e in events if e["rank"] == 1] == [(1, 0), (1, 1), (1, 2)]
    assert len(events) == 6
    assert [e["time"] for e in events] == sorted(e["time"] for e in events)
    assert reader.read_new() == []
    writers[0].post(0, "last", text="ümläut\nline")
    writers[0].close()
    assert [(e["kind"], e["text"]) for e in reader.read_new()] == [("last", "ümläut\nline")]
    reader.remove()
    assert Mailbox(url).read_new() == []
    reader.remove()


def test_objects_are_written_every_second_without_a_further_post() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    writer, reader = Mailbox(url), Mailbox(url)
    writer.post(0, "x")
    deadline = time.monotonic() + 5
    while not reader.read_new():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    writer.close()
    assert not [t for t in threading.enumerate() if t.name == "sparkvod-mailbox-flush"]


def test_an_unfinished_line_waits_for_its_end_and_rubbish_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    reader = Mailbox(str(tmp_path))
    path = tmp_path / "rank-0.jsonl"
    path.write_bytes(b'{"kind": "a", "rank": 0}\n{"kind": "b", ')
    (tmp_path / "other.txt").write_text("not ours")
    assert [e["kind"] for e in reader.read_new()] == ["a"]
    with path.open("ab") as file:
        file.write(b'"rank": 0}\nrubbish\n{"rank": 1}\n')
    assert [e["kind"] for e in reader.read_new()] == ["b"]
    assert caplog.text.count("is no event") == 2


def test_a_store_that_hangs_holds_up_nobody(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    box = Mailbox("memory://hangs")
    answers = threading.Event()
    monkeypatch.setattr(box._fs, "pipe_file", lambda path, data: answers.wait(30), raising=False)
    monkeypatch.setattr(mailbox, "_FLUSH_SECONDS", 0.01)
    monkeypatch.setattr(mailbox, "_CLOSE_SECONDS", 0.2)
    began = time.monotonic()
    for _ in range(20):
        box.post(0, "x")
        time.sleep(0.01)
    box.close()
    assert time.monotonic() - began < 10
    assert "could not be posted to memory://hangs within 0.2 s" in caplog.text
    answers.set()


def test_files_are_closed_to_others(tmp_path: Path) -> None:
    Mailbox(str(tmp_path)).post(0, "x")
    assert stat.S_IMODE((tmp_path / "rank-0.jsonl").stat().st_mode) == 0o600


def test_a_mailbox_that_cannot_be_written_costs_a_warning_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    Mailbox(str(tmp_path / "file" / "box")).post(0, "x")
    assert "an event could not be posted" in caplog.text


def test_a_mailbox_that_is_gone_is_not_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Mailbox(str(tmp_path / "box")).post(0, "too late")
    assert list(tmp_path.iterdir()) == []
    assert caplog.text == ""


def test_what_json_does_not_know_is_posted_as_text(tmp_path: Path) -> None:
    box = Mailbox(str(tmp_path))
    box.post(0, "x", where=Path("a"))
    assert box.read_new()[0]["where"] == "a"
    box.close()


def test_threads_may_post_at_once(tmp_path: Path) -> None:
    box = Mailbox(str(tmp_path))
    threads = [threading.Thread(target=lambda: [box.post(0, "x", pad="p" * 5000) for _ in range(50)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(box.read_new()) == 200
    box.close()


def test_the_current_poster(tmp_path: Path) -> None:
    mailbox.current().post("nobody listens")
    box = Mailbox(str(tmp_path))
    with mailbox.use(box.poster(4)):
        mailbox.current().post("heard", a=1)
    mailbox.current().post("nobody listens")
    assert [(e["kind"], e["rank"], e["a"]) for e in box.read_new()] == [("heard", 4, 1)]
    box.close()


def test_what_is_too_large_for_spark_is_kept_beside_the_events(url: str) -> None:
    box = Mailbox(url)
    box.create()
    digest = box.put("result-0", b"x" * 100_000)
    assert Mailbox(url).take("result-0", digest) == b"x" * 100_000
    assert box.read_new() == []
    box.put("result-0", b"y" * 100_000)
    with pytest.raises(OSError, match="result-0 holds 100000 bytes that are not those that were written"):
        Mailbox(url).take("result-0", digest)
    box.remove()
