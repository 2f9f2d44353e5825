"""One table of options: flags, environment, config file and docs agree, and a wrong value names its
source."""

import os
import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tidemill.cli import options_doc
from tidemill.cli.main import app
from tidemill.cli.options import BY_NAME, ENGINE_NAMES, OPTIONS
from tidemill.cli.settings import Settings, misspelled
from tidemill.config import EngineOptions
from tidemill.config.options import ADAPTERS
from tidemill.errors import ConfigError
from tidemill.frontend.structured import BACKENDS
from tidemill.kv.manager import INDEXES
from tidemill.sched.policies import POLICIES
from tidemill.sched.queue import ORDERS

KEY = "a-key-that-nobody-may-see"


def read(*names: str, flags=None, environ=None, file: Path | None = None) -> Settings:
    return Settings.read(names or tuple(BY_NAME), flags, environ or {}, str(file) if file else None)


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "tidemill.toml"
        path.write_text(text)
        return path

    return write


def invoke(*arguments: str, **environ: str):
    clean = {name: None for name in os.environ if name.startswith("TIDEMILL_")}
    return CliRunner().invoke(app, arguments, env=clean | environ)


def test_the_table_covers_the_engine_and_nothing_is_there_twice():
    assert {option.field for option in OPTIONS if option.field} == {
        field.name for field in fields(EngineOptions)
    }
    assert len(BY_NAME) == len(OPTIONS)
    assert BY_NAME["policy"].choices == tuple(POLICIES)
    assert BY_NAME["prefix-index"].choices == tuple(INDEXES)
    assert BY_NAME["queue-order"].choices == ORDERS
    assert read().engine_options() == EngineOptions()
    assert BY_NAME["structured-backend"].choices == tuple(BACKENDS)


def test_a_flag_goes_before_the_environment_before_the_file_before_the_default(toml):
    file = toml('max-context = 100\nport = 1\nhost = "::1"')
    environ = {"TIDEMILL_MAX_CONTEXT": "200", "TIDEMILL_PORT": "2"}
    settings = read(flags={"max-context": "300", "port": None}, environ=environ, file=file)
    assert [settings[name] for name in ("max-context", "port", "host", "drain-seconds")] == [
        300,
        2,
        "::1",
        30.0,
    ]
    shown = {name: source for name, _, source in settings.shown()}
    assert shown["max-context"] == "--max-context"
    assert shown["port"] == "TIDEMILL_PORT"
    assert shown["host"] == str(file)
    assert shown["drain-seconds"] == "default"
    assert read("port", environ={"TIDEMILL_CONFIG": str(file)})["port"] == 1
    assert read("port", environ={"TIDEMILL_PORT": ""})["port"] == 8000


def test_every_kind_of_value_from_every_source(toml):
    file = toml(
        'kv_memory = "1.5GiB"\ndata-quota = 1000\nprefix_caching = false\napi-key = ["a b", "c"]\n'
        'allowed-host = "x"\ndrain-seconds = 5'
    )
    settings = read(file=file)
    assert settings["kv-memory"] == 3 * 2**29
    assert settings["data-quota"] == 1000
    assert settings["prefix-caching"] is False
    assert settings["api-key"] == ("a b", "c")
    assert settings["allowed-host"] == ("x",)
    assert settings["drain-seconds"] == 5.0
    given = {"API_KEY": "k1  k2", "FAST_MATH": "Yes", "KV_MEMORY": "2M", "STALL_SECONDS": "2.5"}
    settings = read(environ={f"TIDEMILL_{name}": value for name, value in given.items()})
    assert settings["api-key"] == ("k1", "k2")
    assert settings.engine_options() == EngineOptions(fast_math=True, kv_memory_bytes=2**21)
    assert settings["stall-seconds"] == 2.5


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("port", '"abc"', "an integer from 0 to 65535"),
        ("port", "70000", "an integer from 0 to 65535"),
        ("port", "true", "an integer"),
        ("port", "80.5", "an integer"),
        ("device", '"tpu"', "Choose one of auto, cpu, cuda"),
        ("policy", '"magic"', "Choose one of continuous"),
        ("kv-memory", '"lots"', "like 512M"),
        ("kv-memory", "-5", "like 512M"),
        ("prefix-caching", '"perhaps"', "true or false"),
        ("prefix-caching", "1", "true or false"),
        ("stall-seconds", '"nan"', "a number"),
        ("host", '""', "not empty"),
        ("allowed-host", "[1]", "text"),
    ],
)
def test_a_wrong_value_names_its_source_and_what_is_allowed(toml, name, wrong, words):
    file = toml(f"{name} = {wrong}")
    with pytest.raises(ConfigError) as caught:
        read(name, file=file)
    assert caught.value.message.startswith(f"{name} in {file} is ")
    assert words in caught.value.fix
    text = wrong.strip('"')
    if wrong.startswith('"') and text:
        for source, more in (
            (
                f"TIDEMILL_{name.replace('-', '_').upper()}",
                {"environ": {f"TIDEMILL_{name.replace('-', '_').upper()}": text}},
            ),
            (f"--{name}", {"flags": {name: text}}),
        ):
            with pytest.raises(ConfigError) as caught:
                read(name, **more)
            assert caught.value.message == f"{source} is {text!r}."
            assert words in caught.value.fix


@pytest.mark.parametrize(
    ("text", "words", "fix"),
    [
        ("max-contxt = 5", "'max-contxt', which is not an option", "Did you mean max-context?"),
        (
            "[server]\nport = 5",
            "'server', which is not an option",
            "docs/reference/options.md lists them.",
        ),
        (
            "max-model-len = 5",
            "'max-model-len', which is not an option",
            "Did you mean max-context?",
        ),
        ("max-context = 5\nmax_context = 6", "max-context twice", "Keep one"),
        ("max-context: 5", "is not TOML", "max-context = 4096"),
        (
            "config = 'other.toml'",
            "'config', which is not an option",
            "docs/reference/options.md lists them.",
        ),
    ],
)
def test_a_wrong_file_is_a_typed_error(toml, text, words, fix):
    with pytest.raises(ConfigError) as caught:
        read("port", file=toml(text))
    assert words in caught.value.message
    assert fix in caught.value.fix
    with pytest.raises(ConfigError, match="cannot be read"):
        read("port", file=Path("/nowhere/tidemill.toml"))


def test_a_value_that_only_the_engine_can_refuse_names_its_source_too(tiny_folder, toml):
    file = toml("max-context = 9000")
    done = invoke("generate", "x", "-m", str(tiny_folder), "--config", str(file))
    assert isinstance(done.exception, ConfigError)
    assert done.exception.message.endswith(
        f"the model was made for 512. It is set by max-context in {file}."
    )
    done = invoke("generate", "x", "-m", str(tiny_folder), TIDEMILL_PAGE_SIZE="3")
    assert done.exception.message == "page_size is 3. It is set by TIDEMILL_PAGE_SIZE."
    done = invoke("generate", "x", "-m", str(tiny_folder), "--page-size", "3")
    assert done.exception.message == "page_size is 3."


def test_variables_that_look_like_options_are_reported():
    (line,) = misspelled(
        {
            "TIDEMILL_MAX_CONTXT": "1",
            "TIDEMILL_PORT": "1",
            "TIDEMILL_SERVICE_HOST": "10.0.0.1",
            "PATH": "",
        }
    )
    assert (
        line
        == "TIDEMILL_MAX_CONTXT is not an option and is ignored. Did you mean TIDEMILL_MAX_CONTEXT?"
    )
    with pytest.raises(ConfigError, match="enableServiceLinks"):
        read("port", environ={"TIDEMILL_PORT": "tcp://10.0.0.1:8000"})


def test_secrets_are_not_printed(toml):
    file = toml(f'admin-key = "{KEY}"\nport = 8123')
    done = invoke("serve", "--config", str(file), "--show-config", TIDEMILL_API_KEY=f"{KEY} {KEY}")
    assert done.exit_code == 0, done.output
    assert KEY not in done.output
    assert re.search(r"api-key +│ 2 given +│ TIDEMILL_API_KEY", done.output)
    assert re.search(r"port +│ 8123 ", done.output)
    with pytest.raises(ConfigError) as caught:
        read("admin-key", file=toml(f'admin-key = [["{KEY}"]]'))
    assert KEY not in str(caught.value)


def test_every_option_is_a_flag_of_serve_and_engine_options_of_the_others():
    commands = ("serve", "generate", "chat", "bench throughput")
    helps = {command: invoke(*command.split(), "--help-all").output for command in commands}
    for option in OPTIONS:
        flags = [] if option.name == "model" else option.flag.split("/")
        assert all(flag in helps["serve"] for flag in flags), option.name
        for command in ("generate", "chat", "bench throughput"):
            if (command, option.name) in (("chat", "api-key"),):  # to send, not to check
                continue
            if option.section == ADAPTERS:  # one adapter, where something is generated
                taken = command in ("generate", "chat") and option.name != "max-loras"
                assert (option.flag in helps[command]) == taken, (command, option.name)
                continue
            assert all(
                (flag in helps[command]) == (option.name in ENGINE_NAMES) for flag in flags
            ), (command, option.name)


def test_the_docs_are_current():
    folder = Path(__file__).parents[2] / "docs" / "reference"
    command = "python -m tidemill.cli.options_doc docs/reference"
    assert (folder / "options.md").read_text() == options_doc.options_page(), command
    assert (folder / "capabilities.md").read_text() == options_doc.capabilities_page(), command
    assert (folder / "foreign-flags.md").read_text() == options_doc.foreign_flags_page(), command
