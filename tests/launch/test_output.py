from __future__ import annotations

import io
import logging
import sys

import pytest

from sparkvod.launch.output import LinePrinter, LineTee, captured


def test_whole_lines_are_handed_on_and_the_rest_at_the_end() -> None:
    lines: list[str] = []
    original = io.StringIO()
    tee = LineTee(lines.append, original, copy=False)
    for text in ("one", "\ntwo\n", "", "\n", "10%\r20%\r\n", "last"):
        tee.write(text)
    assert lines == ["one", "two", "", "20%"]
    tee.end()
    assert lines[-1] == "last"
    assert original.getvalue() == ""
    tee.write("to whoever still holds it\n")
    assert original.getvalue() == "to whoever still holds it\n"


def test_a_line_without_end_is_bounded() -> None:
    lines: list[str] = []
    tee = LineTee(lines.append, io.StringIO(), copy=False)
    for _ in range(100):
        tee.write("x" * 1000)
    assert [len(line) for line in lines] == [66_000]


def test_what_the_emitter_itself_prints_does_not_come_back() -> None:
    original = io.StringIO()
    tee = LineTee(lambda line: tee.write(f"cannot post {line}\n") and None, original, copy=False)
    tee.write("a line\n")
    assert original.getvalue() == "cannot post a line\n"


def test_streams_and_logging_handlers_go_there_and_back() -> None:
    lines: list[tuple[str, str]] = []
    logger = logging.getLogger("tests.launch.output")
    logger.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    logger.addHandler(handler)
    before = (sys.stdout, sys.stderr, handler.stream)
    try:
        with captured(lambda name, line: lines.append((name, line)), copy=False):
            print("printed")
            logger.warning("logged")
            late = logging.StreamHandler()
            logger.addHandler(late)
    finally:
        logger.handlers.clear()
    assert (sys.stdout, sys.stderr, handler.stream) == before
    assert lines == [("stdout", "printed"), ("stderr", "logged")]


@pytest.mark.parametrize("copy", [False, True])
def test_the_old_stream_gets_a_copy_when_asked(copy: bool, capsys: pytest.CaptureFixture[str]) -> None:
    with captured(lambda name, line: None, copy=copy):
        print("a line")
    assert capsys.readouterr().out == ("a line\n" if copy else "")


def test_printing(capsys: pytest.CaptureFixture[str]) -> None:
    LinePrinter(1)(3, "stderr", "text")
    LinePrinter(0)(3, "stdout", "not shown")
    assert capsys.readouterr() == ("", "[3]<stderr>:text\n")
