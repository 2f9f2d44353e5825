"""`tidemill chat --url`: the same conversation with a server."""

from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.errors import InvalidRequest


def test_chat_with_a_server(server):
    def say(*arguments: str, **more):
        return CliRunner().invoke(app, ["chat", *arguments, "--url", server.url], **more)

    lines = "hello\n/set max_tokens 4\n/set temperature 0\nhello\n/retry\n/set top_k -7\n"
    done = say("-n", "5", input=lines)
    assert done.exit_code == 0, done.output
    assert "Chat with" in done.output
    assert "5 generated" in done.output
    assert done.output.count("4 generated") == 2
    assert "ended by length" in done.output
    assert "top_k" in done.output.splitlines()[-1]
    # nobody has to name the model of a server
    for words in (["hello"], ["-m", "hello"], ["tiny", "hello"]):
        alone = say(*words, "-n", "3")
        assert alone.exit_code == 0, alone.output
        assert "3 generated" in alone.output
        assert ("none of the server's models, so it is the prompt" in alone.output) == (
            "tiny" not in words
        )
    assert "Chat with tiny" in say("tiny", input="").output
    refused = say("no-such-model", "hello")
    assert refused.exit_code == 1
    assert "no-such-model" in refused.output
    assert not isinstance(refused.exception, InvalidRequest)
