"""The commands: in this process where that shows as much, else as processes on a terminal, as a
person runs them."""

import errno
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import urllib.request

import pytest
from rich.console import Console
from safetensors import SafetensorError
from typer.testing import CliRunner

from tests.helpers import LONG_S, byte_tokenizer, make_llama
from tidemill.cli import main as cli
from tidemill.cli.main import app
from tidemill.config import fmt_bytes
from tidemill.engine.bars import LoadingBar
from tidemill.engine.client import EngineClient
from tidemill.errors import ConfigError, EngineDead, TidemillError
from tidemill.kernels import native
from tidemill.server import run

KEY = "a-key-that-nobody-may-see"


def tidemill(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "tidemill", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=LONG_S, **options)


@pytest.fixture
def invoke():
    """A command in this process, which has torch loaded. Commands leave a handler of SIGINT behind."""
    handler = signal.getsignal(signal.SIGINT)
    yield lambda *arguments, **more: CliRunner().invoke(app, arguments, **more)
    signal.signal(signal.SIGINT, handler)


def test_generate_prints_the_text_alone_on_stdout(tiny_folder, invoke, capfd):
    done = invoke("generate", "hello", "-m", str(tiny_folder), "-n", "8", "-t", "0")
    assert done.exit_code == 0, done.stderr
    assert "8 generated" in done.stderr.replace("\n", " ")
    assert capfd.readouterr().out == ""  # nor does anything else write there beside Python
    again = invoke("generate", "-", "-m", str(tiny_folder), "-n", "8", "-t", "0", input="hello")
    assert done.stdout == again.stdout


def test_memory(tiny_folder, invoke):
    done = invoke(
        "memory", str(tiny_folder), "--context", "100", "--requests", "3", "--available", "1G"
    )
    assert done.exit_code == 0, done.output
    assert "2 · 2 heads · 16 · 3 layers · 4 bytes = 768 a" in done.output
    assert "requests of 100 tokens fit" in done.output
    assert invoke("memory", str(tiny_folder), "--available", "1M").exit_code == 1


def test_memory_of_a_model_with_windows_does_not_grow_with_the_context(tmp_path, invoke):
    shape = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "vocab_size": 256, "hidden_size": 64,
        "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 65536, "sliding_window": 512, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    def kv_row(context: int) -> str:
        output = invoke(
            "memory",
            str(tmp_path),
            "--dtype",
            "float32",
            "--available",
            "1G",
            "--context",
            str(context),
        ).output
        return (
            next(line for line in output.splitlines() if "KV cache" in line).split("│")[2].strip()
        )

    # (511 + 256 tokens of a step) / 16 + 1 pages of 4 layers · 2 · 2 heads · 16 · 4 bytes
    assert kv_row(4096) == kv_row(65536) == fmt_bytes(49 * 16 * 4 * 2 * 2 * 16 * 4)


def test_models(tiny_folder, invoke):
    assert "smollm2" in invoke("models").output
    inside = invoke("models", "smollm2").output
    assert "210 Q4_1" in inside
    assert "9 query and 3 KV heads of 64" in inside
    assert "22 KiB in bfloat16" in inside or not native.lib  # as serve says
    assert invoke("list").output == invoke("models").output
    assert invoke("show", "smollm2").output == inside
    assert "hf" in invoke("models", str(tiny_folder)).output


def test_a_mistake_is_an_error_of_two_lines():
    done = tidemill("serve", "smollm2", "--kv-memory", "lots")
    assert done.returncode == 1
    assert (
        done.stderr
        == "error: --kv-memory is 'lots'.\nIt must be an amount of memory like 512M or 4G.\n"
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["generate", "x", "-m", "/nowhere"], "There is no model '/nowhere'"),
        # more than a file's name may have
        (["generate", "x", "-m", "long" * 99], "There is no model 'long"),
        (
            ["serve", ",".join(f"name{i}" for i in range(99)) + "=/nowhere", "--port", "0"],
            "There is no model '/nowhere'",
        ),
        (["generate", "x", "-t", "-1"], "temperature"),
        (
            ["serve", "smollm2", "--policy", "magic", "--port", "0"],
            "--policy is 'magic'. Choose one of continuous",
        ),
        (["memory", "smollm2", "--dtype", "int2"], "int2"),
        (
            ["memory", "smollm2", "--context", "9000"],
            "--context is 9,000, but the model was made for 8,192.",
        ),
        (
            ["plan", "--model", "llama8", "--rate", "1", "--devices", "1xH200"],
            "Give a shape (smollm2, qwen06b, llama8b,",
        ),
        (["serve", "--tls-cert", "/nowhere.pem"], "There is no file '/nowhere.pem'."),
        (
            ["chat", "--threads", "1", "--url", "http://127.0.0.1:1"],
            "--threads is of a model in this process",
        ),
        (["chat", "--url", "http://127.0.0.1:1"], "Check that the server runs"),
        (["chat", "--url", "http://127.0.0.1:1", "hello"], "Check that the server runs"),
        (["generate", "x", "-t", "101"], "a number from 0 to 100; got 101"),
        (["run", "llama3.2"], "is bartowski/Llama-3.2-3B-Instruct-GGUF on the Hugging Face hub"),
        (["generate", "x", "--kv-memory", "1M"], "M with --kv-memory, which hold 128 tokens"),
        (
            ["bench", "serve", "--base-url", "http://127.0.0.1:1/v1"],
            "http://127.0.0.1:1/v1 does not respond",
        ),
        (["bench", "serve", "--url", "http://[::1"], "is not the address of a server"),
        (["bench", "serve", "--json", "/proc/x.json"], "--json /proc/x.json cannot be written"),
        (
            [
                "plan",
                "--model",
                "llama8b",
                "--rate",
                "1",
                "--devices",
                "1xH200",
                "--token-budgets",
                "\u00b2",
            ],
            "like 512,2048",
        ),
        (
            [
                "plan",
                "--model",
                "llama8b",
                "--rate",
                "1",
                "--devices",
                "1xH200",
                "--input-tokens",
                "\u00b2",
            ],
            "Write 1000",
        ),
        (["plan-layout", "--link", "0"], "--link must be above 0"),
        (["plan-layout", "--ranks", "0", "--hardware", "here"], "--ranks must be from 1"),
        (["serve", "--port", "99999"], "--port is '99999'. It must be an integer from 0 to 65535."),
        (["serve", "--threads", "0"], "--threads is '0'. It must be an integer from 1 to 256."),
        (["serve", "--allowed-origin", "foo"], "An allowed origin is 'foo'."),
        (
            ["serve", "--chat-template", "/nowhere.jinja", "--port", "0"],
            "chat_template '/nowhere.jinja' cannot be read",
        ),
        (
            ["serve", "--chat-template-kwargs", "[1]", "--port", "0"],
            "chat_template_kwargs is '[1]'.",
        ),
        (
            ["serve", "--chat-template-kwargs", "{a: 1}", "--port", "0"],
            "chat_template_kwargs is not JSON",
        ),
        (["ps"], "in the foreground"),
        (["stop", "smollm2", "--all"], "Ctrl-C"),
        (["pull", "no-such-model"], "There is no model 'no-such-model'"),
        (
            ["explain", "x", "--url", "http://127.0.0.1:1"],
            "Check that the server runs, and its address (--url).",
        ),
        (["explain", "x", "--url", ""], "Write it like http://HOST:PORT"),
        (["prompt-cache", "list", "--url", "http://[::1"], "Write it like http://HOST:PORT"),
    ],
)
def test_mistakes_are_typed_errors(invoke, arguments, words):
    done = invoke(*arguments)
    assert isinstance(done.exception, TidemillError)
    assert words in str(done.exception)


@pytest.mark.parametrize(
    "name",
    ["latency --repeats 0", "throughput --spread nan", "policies --rate inf", "serve --rate nan"],
)
def test_figures_out_of_range_are_refused(invoke, name):
    assert invoke("bench", *name.split()).exit_code == 2


@pytest.mark.parametrize(
    "command", [[], ["serve"], ["chat"], ["generate"], ["pull"], ["bench"], ["bench", "serve"]]
)
def test_a_short_flag_shows_the_help(invoke, command):
    done = invoke(*command, "-h")
    assert done.exit_code == 0
    assert done.output == invoke(*command, "--help").output
    assert "-h, --help" in done.output


def test_a_temperature_that_makes_noise_is_warned_of(tiny_folder, invoke):
    assert (
        "above a temperature of 2"
        in invoke("generate", "x", "-m", str(tiny_folder), "-n", "1", "-t", "9").output
    )
    assert (
        "temperature"
        not in invoke("generate", "x", "-m", str(tiny_folder), "-n", "1", "-t", "2").output
    )


def test_a_bad_key_names_its_source(invoke, tmp_path):
    file = tmp_path / "keys"
    file.write_text(f"# keys\n{KEY}\n\ncaf\u00e9\n")
    done = invoke("serve", "--api-key-file", str(file))
    assert isinstance(done.exception, ConfigError)
    assert done.exception.message.startswith(f"{file}, line 4: An API key must be printable ASCII")
    done = invoke("serve", env={"TIDEMILL_API_KEY": f"{KEY} br\u00edef"})
    assert done.exception.message.endswith("It is set by TIDEMILL_API_KEY.")
    assert "br\u00edef" not in str(done.exception)


COMPLETES = """if True:
    import os, sys
    from tidemill.cli.main import main
    lines, sys.argv = sys.argv[1:], ["tidemill"]
    for line in lines:
        os.environ |= {"COMP_WORDS": f"tidemill {line}", "COMP_CWORD": str(len(line.split()))}
        try:
            main()
        except SystemExit:
            print("---")
    """


def complete(*lines: str) -> list[list[str]]:
    """What a shell is offered after each of these beginnings of a command."""
    command, settings = (
        [sys.executable, "-c", COMPLETES, *lines],
        {"_TIDEMILL_COMPLETE": "complete_bash"},
    )
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | settings)
    return [offered.split() for offered in done.stdout.split("---")[:-1]]


def test_completion(invoke, tmp_path):
    asked = complete("ser", "serve --max-c", "serve --device c", "serve smo")
    assert asked == [["serve"], ["--max-context"], ["cpu", "cuda"], ["smollm2"]]
    for shell in ("bash", "zsh", "fish"):
        assert "_TIDEMILL_COMPLETE=complete_" + shell in invoke("completion", shell).output
    (tmp_path / "script").write_text(invoke("completion", "bash").output)
    assert subprocess.run(["bash", "-n", str(tmp_path / "script")]).returncode == 0


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), "error: No space left on device.\n"),
        (
            PermissionError(errno.EACCES, "Permission denied", "/made"),
            "error: Permission denied: /made.\n",
        ),
        (
            SafetensorError(
                "Error while serializing: I/O error: Read-only file system (os error 30)"
            ),
            "error: Read-only file system.\n",
        ),
    ],
)
def test_a_place_that_cannot_be_written_to_is_a_line(monkeypatch, capsys, error, line):
    def stops(**_):
        raise error

    monkeypatch.setattr(cli, "make_app", lambda only: stops)
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert capsys.readouterr().err.startswith(line)


def test_other_errors_of_the_system_are_raised(monkeypatch):
    def stops(**_):
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(cli, "make_app", lambda only: stops)
    with pytest.raises(ConnectionResetError):
        cli.main()


def test_the_limit_for_stalled_steps_reaches_the_supervisor(
    tiny_folder, invoke, monkeypatch, tmp_path
):
    seen: list[object] = []

    class Client(EngineClient):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            seen.extend([*arguments, *options.values()])

        async def start(self, *_):
            raise EngineDead("Far enough.")

    monkeypatch.setattr(run, "EngineClient", Client)
    done = invoke(
        "serve",
        str(tiny_folder),
        "--port",
        "0",
        "--stall-seconds",
        "2.5",
        "--data-dir",
        str(tmp_path),
    )
    assert str(done.exception) == "Far enough."
    assert 2.5 in seen


class Terminal:
    """A program on a pseudo-terminal."""

    def __init__(self, *arguments: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            os.execv(sys.executable, [sys.executable, "-m", "tidemill", *arguments])
        self.seen = ""

    def kill(self) -> None:
        try:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        except (ProcessLookupError, ChildProcessError):
            pass  # it has ended and been waited for
        os.close(self._fd)

    def until(self, pattern: str) -> re.Match:
        """Read until the pattern is found in what was not looked at yet. What never comes meets the
        test's own time limit."""
        while not (found := re.search(pattern, self.seen, re.S)):
            try:
                self.seen += os.read(self._fd, 65536).decode(errors="replace")
            except OSError:
                pytest.fail(f"It ended, and there is no {pattern!r} in: {self.seen}")
        self.seen = self.seen[found.end() :]
        return found

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def interrupt_until(self, pattern: str) -> None:
        """Ctrl-C, again and again: one that comes just before readline waits for a key is noticed
        with the next."""
        while not re.search(pattern, self.seen, re.S):
            self.type("\x03")
            if select.select([self._fd], [], [], 1.0)[0]:
                self.seen += os.read(self._fd, 65536).decode(errors="replace")
        self.until(pattern)

    def exit_code(self) -> int:
        """Reads to the end first: a program whose output nobody reads may not end."""
        try:
            while os.read(self._fd, 65536):
                pass
        except OSError:
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@pytest.fixture
def terminal():
    """A program on a terminal; it is ended with the test."""
    started: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        started.append(Terminal(*arguments))
        return started[-1]

    yield start
    for each in started:
        each.kill()


PROMPT = r"\x1b\[\?2004h"  # what the line editor writes when it begins to read


def test_a_conversation_on_a_terminal(tmp_path, terminal, monkeypatch):
    monkeypatch.setenv("PROMPT_TOOLKIT_NO_CPR", "1")  # nobody answers where the cursor is
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    make_llama(tmp_path, vocab_size=320, max_position_embeddings=8192)
    byte_tokenizer(tmp_path)
    chat = terminal("chat", str(tmp_path), "--seed", "3", "-n", "300", "--threads", "1")
    chat.until(PROMPT)
    chat.type("hello\\\rthere\r")
    chat.until(r"there.*?2004l.")  # the message was sent, and a first piece of the response came
    chat.type("EARLY")
    answer = chat.until("ended by")
    assert "EARLY" not in answer.string[: answer.end()]
    chat.until("EARLY")  # at the next prompt
    chat.type("\x15/set max_tokens 100000\r")
    chat.until("max_tokens is 100000")
    chat.until(PROMPT)
    chat.type("/retry\r")
    chat.until("2004l.*?[^\\s]")
    chat.type("\x03")
    chat.until("ended by you")
    chat.until(PROMPT)
    chat.type("/set max_tokens 5\r")
    chat.until("max_tokens is 5")
    chat.until(PROMPT)
    chat.type("\x1b[200~one\ntwo\x1b[201~\r")
    chat.until("5 generated.*ended by length")
    chat.until(PROMPT)
    for typed, shown in {
        "/retry": "5 generated",
        "/set temperature 99": "temperature",
        "/set frob 1": "There is no parameter frob",
        f"/save {tmp_path}/talk.json": "4 messages are in",
        "/clear": "starts over",
        "/system be brief": "System prompt set",
        f"/load {tmp_path}/talk.json": "4 messages from",
        f"/load {tmp_path}/config.json": "cannot be read|holds no messages",
        "/nonsense": "There is no command /nonsense",
        "/help": "/retry",
    }.items():
        chat.type(f"{typed}\r")
        chat.until(f"2004l.*?({shown})")
        chat.until(PROMPT)
    chat.type("\x03")
    chat.until("leaves")
    chat.until(PROMPT)
    chat.type("/exit\r")
    assert chat.exit_code() == 0
    messages = json.loads((tmp_path / "talk.json").read_text())["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "user", "assistant"]
    assert messages[0]["content"] == "hello\nthere"
    assert messages[2]["content"] == "one\ntwo"
    history = tmp_path / "tidemill" / "chat-history"
    assert "one" in history.read_text()
    assert history.stat().st_mode & 0o77 == 0


def test_chat_without_a_terminal_and_with_one_question(tiny_folder, invoke):
    done = invoke(
        "chat", str(tiny_folder), "-n", "3", "-t", "0", input="one\\\ntwo\n/system x\nthree\n"
    )
    assert done.exit_code == 0, done.output
    assert done.output.count("3 generated") == 2
    alone = invoke("run", str(tiny_folder), "one\ntwo", "-n", "3", "-t", "0")
    assert alone.exit_code == 0
    assert alone.stdout.splitlines()[0] == done.stdout.splitlines()[0]
    with_template = ["--chat-template", "{{ messages[0].content }}", "-n", "3", "-t", "0"]
    assert "3 prompt tokens" in invoke("chat", str(tiny_folder), "abc", *with_template).output


def test_serve_with_a_config_file_until_ctrl_c(tiny_folder, tmp_path, terminal):
    file = tmp_path / "tidemill.toml"
    file.write_text(f"""
        model = "{tiny_folder}"
        served_name = "tiny"
        port = 0
        max-requests = 3
        max-queued = 7
        data-dir = "{tmp_path / "data"}"
        admin-key = "{KEY}"
    """)
    server = terminal("serve", "--config", str(file))
    table = server.until(
        "Tidemill serves tiny on (http://[0-9.:]+) .*curl .*Authorization: Bearer YOUR_KEY"
    )
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", table.string)  # without colours
    assert re.search(r"slots +│ 3 sequences +│ given", shown)
    assert re.search(r"queue +│ 7 requests", shown)
    assert KEY not in table.string
    request = urllib.request.Request(
        f"{table[1]}/v1/models", headers={"Authorization": f"Bearer {KEY}"}
    )
    with urllib.request.urlopen(request) as reply:
        assert json.load(reply)["data"][0]["id"] == "tiny"
    server.type("\x03")
    assert server.exit_code() == 0


def test_ctrl_c_while_a_server_loads_says_so(tiny_folder, tmp_path, terminal):
    server = terminal("serve", str(tiny_folder), "--port", "0", "--data-dir", str(tmp_path))
    shown = server.until("Starting the engine")  # nothing is known of the weights yet
    server.type("\x03")
    end = server.until("Stopped by Ctrl-C before the model was loaded")
    assert "0/?" not in shown.string + end.string
    assert server.exit_code() == 130


def test_loading_has_figures_once_they_are_known():
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with LoadingBar(console=console) as bar:
        for done in (0, 10**9, 2 * 10**9):
            bar.show(done, 2 * 10**9)
            bar._progress.refresh()
    shown = console.file.getvalue()
    stages = re.findall(
        "Starting the engine|Loading weights.*?1.0/2.0 GB|Preparing the engine", shown
    )
    assert list(dict.fromkeys(stage[:15] for stage in stages)) == [
        "Starting the en",
        "Loading weights",
        "Preparing the e",
    ]
    assert "?" not in re.sub(r"\x1b\[\?", "", shown)
