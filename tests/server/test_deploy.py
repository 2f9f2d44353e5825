"""deploy/: every file can be parsed, its commands and variables are real options, and its probes
are routes of the server."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from tidemill.cli.main import app
from tidemill.cli.options import BY_NAME, CONFIG
from tidemill.server.http.access import OPEN_PATHS

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILES = ("Dockerfile", "Dockerfile.cuda")


def instruction(name: str, word: str) -> str:
    """Of a Dockerfile, with its continued lines."""
    text = (DEPLOY / name).read_text().replace("\\\n", " ")
    return (
        [line for line in text.splitlines() if line.strip().startswith(word + " ")][-1]
        .strip()
        .removeprefix(word)
        .strip()
    )


def compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["tidemill"]


def manifests() -> dict[str, Any]:
    return {
        one["kind"]: one
        for one in yaml.safe_load_all((DEPLOY / "kubernetes" / "tidemill.yaml").read_text())
    }


def pod() -> dict[str, Any]:
    return manifests()["Deployment"]["spec"]["template"]["spec"]


def unit() -> dict[str, str]:
    lines = [
        line
        for line in (DEPLOY / "tidemill.service").read_text().splitlines()
        if "=" in line and not line.startswith("#")
    ]
    return dict(line.split("=", 1) for line in lines if not line.startswith("Environment="))


COMMANDS = {
    **{name: json.loads(instruction(name, "CMD")) for name in DOCKERFILES},
    "compose": compose()["command"],
    "kubernetes": pod()["containers"][0]["args"],
    "systemd": shlex.split(unit()["ExecStart"])[1:],
}


@pytest.mark.parametrize("where", COMMANDS)
def test_commands_are_understood(where, tmp_path):
    config = tmp_path / "tidemill.toml"
    config.write_text("")
    command = [
        str(config) if word.startswith("/etc/tidemill/") else word for word in COMMANDS[where]
    ]
    clean = {name: None for name in os.environ if name.startswith("TIDEMILL_")}
    done = CliRunner().invoke(app, [*command, "--show-config"], env=clean)
    assert done.exit_code == 0, done.output + str(done.exception)
    assert done.output.count("--") >= 2  # values whose source is a flag


def test_variables_are_options():
    known = {option.variable for option in BY_NAME.values()} | {CONFIG.variable}
    for path in (file for file in DEPLOY.rglob("*") if file.is_file()):
        assert set(re.findall(r"\bTIDEMILL_[A-Z_]+", path.read_text())) <= known, path


def test_probes_are_routes_without_a_key(roomy):
    container = pod()["containers"][0]
    paths = [
        container[probe]["httpGet"]["path"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe")
    ]
    paths += [re.search(r"8000(/\w+)", instruction(name, "HEALTHCHECK"))[1] for name in DOCKERFILES]
    assert set(paths) == {"/health", "/ready"} <= OPEN_PATHS
    for path in set(paths):
        assert httpx.get(roomy.url + path).status_code == 200


def seconds(command: list[str]) -> float:
    return float(command[command.index("--drain-seconds") + 1])


def test_there_is_time_to_drain():
    stop_s = int(pod()["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod()["terminationGracePeriodSeconds"] >= stop_s + seconds(COMMANDS["kubernetes"]) + 10
    assert (
        int(compose()["stop_grace_period"].removesuffix("s")) >= seconds(COMMANDS["compose"]) + 10
    )
    assert int(unit()["TimeoutStopSec"]) >= seconds(COMMANDS["systemd"]) + 10


def test_nothing_runs_as_root():
    assert pod()["securityContext"]["runAsNonRoot"] is True
    assert unit()["DynamicUser"] == "yes"
    for name in DOCKERFILES:
        assert instruction(name, "USER") == "tidemill"
        assert f"--uid {pod()['securityContext']['runAsUser']} " in (DEPLOY / name).read_text()


def test_what_is_written_has_a_place():
    """The root is read-only: the home folder, data and downloads are in the volume."""
    state = f"/var/lib/{unit()['StateDirectory']}"
    variables = dict(
        re.findall(
            r"^Environment=(\w+)=(.*)$", (DEPLOY / "tidemill.service").read_text(), re.MULTILINE
        )
    )
    assert variables["HOME"] == state == unit()["WorkingDirectory"]
    assert variables["HF_HOME"].startswith(state)
    assert compose()["volumes"][0].split(":")[1] == state
    assert state in [mount["mountPath"] for mount in pod()["containers"][0]["volumeMounts"]]
    for name in DOCKERFILES:
        text = (DEPLOY / name).read_text()
        assert instruction(name, "VOLUME") == instruction(name, "WORKDIR") == state
        assert f"--home-dir {state} " in text
        assert all(path.startswith(state) for path in re.findall(r"(?:HF_HOME|_DIR)=(\S+)", text))


def test_images_have_compiled_kernels_and_what_triton_needs():
    for name in DOCKERFILES:
        assert "kernels/native/*.so" in (DEPLOY / name).read_text()
    cuda = (DEPLOY / "Dockerfile.cuda").read_text()
    assert {"python3-dev", "gcc", "libc6-dev"} <= set(cuda.split())
    assert not re.search(r"^FROM .* AS ", cuda, re.MULTILINE)  # one stage: the compiler stays


def test_kubernetes_names_agree():
    named = manifests()
    labels = named["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert named["Service"]["spec"]["selector"].items() <= labels.items()
    assert named["Deployment"]["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert pod()["enableServiceLinks"] is False  # TIDEMILL_PORT=tcp://... would be an error
    command = COMMANDS["kubernetes"]
    assert pod()["containers"][0]["ports"][0]["containerPort"] == int(
        command[command.index("--port") + 1]
    )
    assert command[command.index("--allowed-host") + 1] == named["Service"]["metadata"]["name"]


def test_what_the_dockerfiles_copy_is_there():
    for name in DOCKERFILES:
        lines = re.findall(r"^COPY (?!--from)(.*) \S+$", (DEPLOY / name).read_text(), re.MULTILINE)
        for source in " ".join(lines).split():
            assert (DEPLOY.parent / source).exists()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_accepts_the_unit(tmp_path):
    text = (
        (DEPLOY / "tidemill.service")
        .read_text()
        .replace("/opt/tidemill/bin/tidemill", sys.executable)
    )
    (tmp_path / "tidemill.service").write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / "tidemill.service"], capture_output=True, text=True
    )
    ours = [line for line in done.stderr.splitlines() if "tidemill.service" in line]
    assert not ours, done.stderr
