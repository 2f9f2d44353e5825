"""Messages that are read while they stream."""

from tidemill.frontend.parsers import CallArguments, CallStart, TextPiece
from tidemill.server.generation.message import MessageReader


class Scripted:
    """A parser that finds reasoning, text and a call in any text."""

    def push(self, text):
        start, arguments = CallStart(0, "tide"), CallArguments(0, "{}")
        return [TextPiece("hm", is_reasoning=True), TextPiece(text), start, arguments]

    def finish(self):
        return []


def test_a_stream_does_not_hold_the_text_that_it_has_sent():
    reader = MessageReader(Scripted(), keeps_text=False)
    assert "".join(event.text for event in reader.read("answer", True)) == "hmanswer{}"
    assert [part.text for part in reader.parts] == ["hm", "", "{}"]
    whole = MessageReader(Scripted())
    whole.read("answer", True)
    assert whole.text_of("text") == "answer"
