"""Hub ids against a Hub on loopback: what is fetched and when, at which commit, and what is said when it fails."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from parallel_synthesis.provenance import hub
from parallel_synthesis.provenance.inside import Inside

ADAPTER = "judger_lora/adapter_model.safetensors"
STATE = "training_state.pt"
NEEDED = ["cache_mapper.pt", "cache_mapper_config.json", "judger_lora/adapter_config.json", ADAPTER]
# As the product does it, in a process of its own: huggingface_hub reads its environment when it is imported.
SCRIPT = """
import json, sys
from parallel_synthesis.errors import ParallelSynthesisError
from parallel_synthesis.provenance import hub
quick = "--quick" in sys.argv
given, *optional = [argument for argument in sys.argv[1:] if argument != "--quick"]
wanted = hub.Wanted(
    required=("cache_mapper.pt", "judger_lora/adapter_config.json", "judger_lora/adapter_model.safetensors"),
    optional=("cache_mapper_config.json", "manifest.json", *optional),
)
try:
    found = hub.fetched(given, wanted, quick=quick)
    print(json.dumps({"name": found.name, "directory": str(found.directory)}))
except ParallelSynthesisError as error:
    print(json.dumps({"kind": type(error).__name__, "says": str(error)}))
"""

pytestmark = pytest.mark.lane
Fetch = Callable[..., dict[str, Any]]


def start(environment: Mapping[str, str], *args: str, **env: str) -> subprocess.Popen[str]:
    more = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_VERBOSITY": "error", **env}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *args],
        env={**environment, **more},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def fetch(hub_environment: dict[str, str]) -> Fetch:
    def run(*args: str, **env: str) -> dict[str, Any]:
        out, err = start(hub_environment, *args, **env).communicate(timeout=60)
        assert err == ""
        answer: dict[str, Any] = json.loads(out)
        return answer

    return run


@pytest.fixture
def checkpoint(lora_checkpoint: Callable[..., Path], tmp_path: Path) -> Path:
    directory = lora_checkpoint(tmp_path / "published", seed=1)
    (directory / STATE).write_bytes(b"big" * 5000)
    return directory


def cache_of(environment: Mapping[str, str]) -> Path:
    return Path(environment["HF_HOME"]) / "hub" / "models--owner--name"


def test_only_what_is_needed_is_fetched_and_only_once(
    hub_server: Any, fetch: Fetch, checkpoint: Path, hub_environment: dict[str, str]
) -> None:
    commit = hub_server.publish("owner/name", checkpoint)
    found = fetch("owner/name")
    assert found["name"] == f"hf://owner/name@{commit}"
    assert sorted(hub_server.downloads()) == sorted(NEEDED)
    for name in NEEDED:
        assert (Path(found["directory"]) / name).read_bytes() == (checkpoint / name).read_bytes()
    hub_server.asked()
    assert fetch("hf://owner/name") == found
    assert hub_server.downloads() == []
    asked = [line for line in hub_server.asked() if "agent" not in line]
    assert asked == ["GET /api/models/owner/name/revision/main"]  # whether main has moved, and nothing else
    assert fetch(f"owner/name@{commit}") == found == fetch(f"hf://owner/name@{commit}")
    assert fetch("owner/name", HF_HUB_OFFLINE="1") == found
    assert hub_server.asked() == []  # manifest.json, which the repository lacks, is known to be lacking
    fetch(f"owner/name@{commit}", STATE)
    assert hub_server.downloads() == [STATE]


def test_a_branch_that_moves_is_noticed(hub_server: Any, fetch: Fetch, checkpoint: Path) -> None:
    first = hub_server.publish("owner/name", checkpoint)
    hub_server.publish("owner/name", checkpoint, ref="v1/of-may")
    assert fetch("owner/name")["name"].endswith(first)
    (checkpoint / "cache_mapper_config.json").write_text('{"hidden_dim": 32, "metadata_features": "none"}')
    second = hub_server.publish("owner/name", checkpoint)
    hub_server.asked()
    assert fetch("owner/name")["name"].endswith(second)
    assert hub_server.downloads() == ["cache_mapper_config.json"]  # the rest is the same, by its content
    assert fetch("owner/name@v1/of-may")["name"].endswith(first)
    for given, commit in (
        ("owner/name", second),
        ("owner/name@v1/of-may", first),
        (f"owner/name@{first}", first),
    ):
        assert fetch(given, HF_HUB_OFFLINE="1")["name"] == f"hf://owner/name@{commit}"
    hub_server.publish("owner/name", checkpoint, ref="main", extra=b"")
    hub_server.repositories["owner/name"].refs["main"] = first  # back again: what main is must be noted
    assert fetch("owner/name")["name"].endswith(first)
    assert fetch("owner/name", HF_HUB_OFFLINE="1")["name"].endswith(first)


def test_what_is_not_there_or_not_allowed(
    hub_server: Any, fetch: Fetch, checkpoint: Path, tmp_path: Path
) -> None:
    def says(given: str, *parts: str, kind: str = "CheckpointError", **env: str) -> None:
        answer = fetch(given, **env)
        assert answer.get("kind") == kind, answer
        for part in (given, *parts):
            assert part in answer["says"], answer["says"]

    hub_server.publish("owner/name", checkpoint)
    both = "no such directory, and as a Hub id: no such repository"
    says("owner/nam", both, "HF_TOKEN")
    says("hf://owner/nam", "no such repository")
    assert "directory" not in fetch("hf://owner/nam")["says"]
    says("owner/name@v2", "has no revision v2", "a branch, a tag or a full commit")
    says("owner/na--me", "no such directory", "OWNER/NAME")
    says("hf://owner/name/sub", "a folder inside a repository can not be named")
    says("hf://owner/name@v2/runs/x", "no revision v2/runs/x", "If runs/x is a folder of v2: ")
    says(
        "hf://owner/name@v2/runs/x",
        "`hf download owner/name --revision v2/runs/x`. If",
        kind="StorageError",
        HF_HUB_OFFLINE="1",
    )
    home = hub_server.repositories["owner/name"]
    home.gated = True
    says("owner/name", "is gated", f"{hub_server.url}/owner/name", "HF_TOKEN")
    home.gated, home.token = False, "hf_right"
    says("owner/name", both, "private")
    says("owner/name", both, HF_TOKEN="hf_wrong")
    hub_server.asked()
    assert "name" in fetch("owner/name", HF_TOKEN="hf_right")
    home.token = None
    shutil.copytree(checkpoint, tmp_path / "run" / "latest")
    shutil.rmtree(checkpoint / "judger_lora")
    hub_server.publish("owner/other", checkpoint)
    says("owner/other", "no checkpoint", ADAPTER, "it holds", STATE)
    hub_server.publish("owner/run", tmp_path / "run")
    says("owner/run", "hf download owner/run --local-dir DIR", "DIR/latest")


def test_the_token_goes_to_the_endpoint_alone(hub_server: Any, fetch: Fetch, checkpoint: Path) -> None:
    hub_server.publish("owner/name", checkpoint)
    hub_server.repositories["owner/name"].token = "hf_right"
    assert "name" in fetch("owner/name", HF_TOKEN="hf_right")
    hosts = {(request.host, request.token) for request in hub_server.requests if "agent" not in request.path}
    assert hosts == {("127.0.0.1", "hf_right"), ("localhost", None)}


def test_no_network(hub_server: Any, fetch: Fetch, checkpoint: Path, hub_environment: dict[str, str]) -> None:
    commit = hub_server.publish("owner/name", checkpoint)
    # Offline with nothing: a bare a/b is rather a mistyped path, which is the input's fault.
    answer = fetch("owner/name", HF_HUB_OFFLINE="1")
    assert answer["kind"] == "CheckpointError" and "no such directory" in answer["says"]
    answer = fetch("hf://owner/name@v1", HF_HUB_OFFLINE="1")
    assert answer["kind"] == "StorageError"
    assert "HF_HUB_OFFLINE" in answer["says"] and "`hf download owner/name --revision v1`" in answer["says"]
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    answer = fetch("hf://owner/name", **nowhere)
    assert answer["kind"] == "StorageError" and "127.0.0.1:9 can not be reached" in answer["says"]
    assert "refused" in answer["says"] and "Max retries" not in answer["says"]
    hub_server.down = 503
    answer = fetch("hf://owner/name")
    assert answer["kind"] == "StorageError" and "answered 503" in answer["says"]
    for env, said in ((nowhere, "127.0.0.1:9 can not be reached"), ({}, "answered 503")):
        answer = fetch("owner/name", **env)
        assert answer["kind"] == "CheckpointError", answer
        assert answer["says"].startswith("owner/name: no such directory, and as a Hub id: the Hub at")
        assert said in answer["says"] and "check the path; if a repository is meant" in answer["says"]
    hub_server.down = None
    fetch("owner/name")
    # An older snapshot is not silently taken for main; it is named.
    answer = fetch("owner/name", **nowhere)
    assert (
        answer["kind"] == "StorageError"
        and f"hf://owner/name@{commit} is in the local cache" in answer["says"]
    )
    assert fetch(f"owner/name@{commit}", **nowhere)["name"].endswith(commit)
    answer = fetch("owner/name@v2", HF_HUB_OFFLINE="1")
    assert f"has its commits {commit}" in answer["says"]


def test_a_commit_that_hf_download_has_fetched_needs_no_network(
    hub_server: Any, fetch: Fetch, checkpoint: Path, hub_environment: dict[str, str]
) -> None:
    """It fetches every file, and leaves no note of the optional ones that the repository has not."""
    commit = hub_server.publish("owner/name", checkpoint)
    script = "import sys, huggingface_hub as h; h.snapshot_download('owner/name', revision=sys.argv[1])"
    for revision in ("main", commit):
        subprocess.run([sys.executable, "-c", script, revision], env=hub_environment, check=True)
    assert not (cache_of(hub_environment) / ".no_exist").exists()
    given, nowhere = f"hf://owner/name@{commit}", {"HF_ENDPOINT": "http://127.0.0.1:9"}
    found = fetch(given, **nowhere)
    assert found.get("name") == given and found == fetch(given, HF_HUB_OFFLINE="1")
    hub_server.down = 503
    assert fetch(given) == found == fetch(given.removeprefix("hf://"))
    hub_server.down = None
    # A branch may have moved: what is said of it works.
    said = fetch("hf://owner/name", **nowhere)["says"]
    assert f"; {given} is in the local cache: name it so" in said
    # With anything required not there it is no checkpoint, and no advice to name it as it was named.
    (Path(found["directory"]) / ADAPTER).unlink()
    answer = fetch(given, **nowhere)
    assert answer["kind"] == "StorageError" and "can not be reached" in answer["says"]
    assert "name it so" not in answer["says"]
    # A repository that is gone or closed is told, whatever the cache has.
    hub_server.repositories.clear()
    fetched = fetch(given)
    assert fetched["kind"] == "CheckpointError" and "no such repository" in fetched["says"]


def test_a_bare_id_that_the_cache_knows_is_no_path(hub_server: Any, fetch: Fetch, checkpoint: Path) -> None:
    hub_server.publish("owner/name", checkpoint)
    fetch("owner/name")
    for env in ({"HF_ENDPOINT": "http://127.0.0.1:9"}, {"HF_HUB_OFFLINE": "1"}):
        answer = fetch("owner/name@v2", **env)
        assert answer["kind"] == "StorageError" and "no such directory" not in answer["says"]


def test_half_a_download_is_no_checkpoint(
    hub_server: Any, fetch: Fetch, checkpoint: Path, hub_environment: dict[str, str]
) -> None:
    commit = hub_server.publish("owner/name", checkpoint)
    hub_server.stalled.add(ADAPTER)
    client = start(hub_environment, "owner/name")
    deadline = time.monotonic() + 30
    while ADAPTER not in hub_server.downloads() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)  # the half arrives
    client.kill()
    client.communicate()
    assert ADAPTER in hub_server.downloads()
    hub_server.release.set()
    snapshot = cache_of(hub_environment) / "snapshots" / commit
    assert not (snapshot / ADAPTER).exists()
    answer = fetch(f"owner/name@{commit}", HF_HUB_OFFLINE="1")
    assert answer["kind"] == "StorageError"
    assert "only in part" in answer["says"] and ADAPTER in answer["says"]
    hub_server.stalled.clear()
    hub_server.asked()
    assert fetch("owner/name")["directory"] == str(snapshot)
    assert (snapshot / ADAPTER).read_bytes() == (checkpoint / ADAPTER).read_bytes()


def test_a_cut_is_told_or_overcome(hub_server: Any, fetch: Fetch, checkpoint: Path) -> None:
    hub_server.publish("owner/name", checkpoint)
    hub_server.broken.add(ADAPTER)
    hub_server.dying = True
    answer = fetch("owner/name")
    assert answer["kind"] == "StorageError", answer
    assert "was cut off" in answer["says"] and "same call again" in answer["says"]
    hub_server.dying = False
    hub_server.gone.clear()
    (checkpoint / STATE).write_bytes(os.urandom(24 << 20))  # the client writes 10 MiB at a time
    hub_server.publish("owner/name", checkpoint)
    hub_server.asked()
    hub_server.broken.add(STATE)
    found = fetch("owner/name", STATE)
    if (
        "kind" in found
    ):  # the release's client does not go on by itself, but keeps what it has for the next call
        assert "was cut off" in found["says"]
        found = fetch("owner/name", STATE)
    assert (Path(found["directory"]) / STATE).read_bytes() == (checkpoint / STATE).read_bytes()
    assert [request.range for request in hub_server.requests if request.range] == [f"bytes={10 << 20}-"]


def test_a_damaged_cache_is_named_and_mended(
    hub_server: Any, fetch: Fetch, checkpoint: Path, hub_environment: dict[str, str]
) -> None:
    commit = hub_server.publish("owner/name", checkpoint)
    snapshot = Path(fetch("owner/name")["directory"])
    for name in ("cache_mapper.pt", "judger_lora/adapter_config.json"):  # named by sha256, and by git's sha1
        blob = (snapshot / name).resolve()
        data = blob.read_bytes()
        blob.chmod(0o600)
        blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        for env in ({}, {"HF_HUB_OFFLINE": "1"}):
            answer = fetch("owner/name", **env)
            assert answer["kind"] == "StorageError", answer
            assert (
                str(blob) in answer["says"]
                and name in answer["says"]
                and "remove this file" in answer["says"]
            )
        blob.unlink()
        answer = fetch(f"owner/name@{commit}", HF_HUB_OFFLINE="1")
        assert answer["kind"] == "StorageError" and "a link to a blob that is not there" in answer["says"]
        hub_server.asked()
        assert "name" in fetch(f"owner/name@{commit}")
        assert hub_server.downloads() == [name] and blob.read_bytes() == data


def test_a_big_blob_is_what_its_name_says(
    hub_server: Any, fetch: Fetch, checkpoint: Path, hub_environment: dict[str, str]
) -> None:
    """A quick look, for callers that only show what there is, does not read all of a big file."""
    (checkpoint / STATE).write_bytes(os.urandom(5 << 20))
    commit = hub_server.publish("owner/name", checkpoint)
    blob = (Path(fetch("owner/name", STATE)["directory"]) / STATE).resolve()
    blob.chmod(0o600)
    with blob.open("r+b") as file:
        file.seek(3 << 20)
        file.write(b"other bytes")
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        answer = fetch(f"owner/name@{commit}", STATE, **env)
        assert answer["kind"] == "StorageError" and str(blob) in answer["says"], answer
        assert "not those that its name stands for" in answer["says"] and "remove this file" in answer["says"]
        assert "name" in fetch(f"owner/name@{commit}", STATE, "--quick", **env)
    blob.unlink()
    assert "name" in fetch(f"owner/name@{commit}", STATE)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"<html>Please log in</html>", "it is no JSON"),
        (b"", "it is no JSON"),
        (b"[]", "describes no repository"),
        (b"{}", "describes no repository"),
        (b"null", "describes no repository"),
        (
            b'{"id": "owner/name", "sha": "%s", "siblings": [{"x": 1}]}' % (b"a" * 40),
            "describes no repository",
        ),
        (b'{"id": "owner/name", "sha": "%s", "siblings": [{"rfilename": 1}]}' % (b"a" * 40), "or no files"),
        (b'{"id": "owner/name", "sha": "../../..", "siblings": []}', "names no commit"),
    ],
)
def test_an_answer_that_is_no_hub_s(hub_server: Any, fetch: Fetch, body: bytes, said: str) -> None:
    hub_server.instead = body
    answer = fetch("hf://owner/name")
    assert answer["kind"] == "StorageError", answer
    assert f"what {hub_server.url} answers is no answer of a Hub: " in answer["says"]
    assert said in answer["says"] and "check HF_ENDPOINT" in answer["says"]
    answer = fetch("owner/name")
    assert (
        answer["kind"] == "CheckpointError" and "no such directory, and as a Hub id: what" in answer["says"]
    )


@pytest.mark.parametrize("endpoint", ["http://127.0.0.1:99999", "http://[::1", "huggingface.co", "https://"])
def test_an_endpoint_that_is_no_address(fetch: Fetch, endpoint: str) -> None:
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        answer = fetch("hf://owner/name", HF_ENDPOINT=endpoint, **env)
        assert answer["kind"] == "ConfigError" and answer["says"].startswith(f"HF_ENDPOINT = {endpoint}: ")


def test_what_is_in_the_way_in_the_cache_is_named(
    hub_server: Any, fetch: Fetch, checkpoint: Path, hub_environment: dict[str, str]
) -> None:
    """A repeated call would not help, so nothing is said of one before the cause is removed."""
    commit = hub_server.publish("owner/name", checkpoint)
    home = cache_of(hub_environment)
    snapshot = home / "snapshots" / commit
    for place in (home.parent, home, home / "blobs", snapshot):
        shutil.rmtree(home.parent, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
        answer = fetch("owner/name")
        assert answer["kind"] == "StorageError", answer
        assert f"the local Hub cache can not be used: {place}" in answer["says"]
        assert "HF_HOME" in answer["says"] and "cut off" not in answer["says"]
        place.unlink()
    shutil.rmtree(home.parent, ignore_errors=True)
    fetch("owner/name")
    blob = (snapshot / ADAPTER).resolve()
    blob.unlink()
    blob.mkdir()
    for env in ({}, {"HF_HUB_OFFLINE": "1"}):
        for place in (blob, snapshot / ADAPTER):
            if place != blob:
                place.unlink()
                place.mkdir()
            answer = fetch(f"owner/name@{commit}", **env)
            assert answer["kind"] == "StorageError", answer
            assert answer["says"].startswith(f"{place}: a directory in the local Hub cache")
            assert ADAPTER in answer["says"] and "remove it" in answer["says"]
        (snapshot / ADAPTER).rmdir()
        (snapshot / ADAPTER).symlink_to(blob)  # a blob there, but no entry that says so, is the same
    (snapshot / ADAPTER).unlink()
    assert fetch(f"owner/name@{commit}")["says"].startswith(f"{blob}: a directory in the local Hub cache")
    blob.rmdir()
    assert fetch("owner/name")["directory"] == str(snapshot)


def test_an_unfinished_download_is_no_branch(
    hub_server: Any, fetch: Fetch, checkpoint: Path, hub_environment: dict[str, str]
) -> None:
    """Without the Hub a branch stays what was whole of it."""
    first = hub_server.publish("owner/name", checkpoint)
    fetch("owner/name")
    (checkpoint / "cache_mapper.pt").write_bytes(b"another" * 100)
    second = hub_server.publish("owner/name", checkpoint)
    hub_server.broken.add("cache_mapper.pt")
    hub_server.dying = True
    answer = fetch("owner/name")
    assert answer.get("kind") == "StorageError" and "was cut off" in answer["says"], answer
    assert fetch("owner/name", HF_HUB_OFFLINE="1")["name"].endswith(first)
    hub_server.gone.clear()
    assert fetch("owner/name")["name"].endswith(second)
    assert fetch("owner/name", HF_HUB_OFFLINE="1")["name"].endswith(second)
    assert sorted(path.name for path in (cache_of(hub_environment) / "refs").iterdir()) == ["main"]


def test_several_processes_download_once(
    hub_server: Any, checkpoint: Path, hub_environment: dict[str, str]
) -> None:
    hub_server.publish("owner/name", checkpoint)
    clients = [start(hub_environment, "owner/name") for _ in range(4)]
    answers = {client.communicate(timeout=120) for client in clients}
    assert len(answers) == 1 and "directory" in next(iter(answers))[0]
    assert sorted(hub_server.downloads()) == sorted(NEEDED)


def test_blobs_that_repositories_share(tmp_path: Path) -> None:
    """huggingface_hub 2 makes a big file's blob a link into CACHE/blobs."""
    repository, xet = tmp_path / "models--a--b", "ab" * 32
    snapshot = repository / "snapshots" / ("0" * 40)
    store = tmp_path / "blobs" / "ab"
    for folder in (snapshot, store, repository / "blobs"):
        folder.mkdir(parents=True)
    (store / xet).write_bytes(b"content")
    (repository / "blobs" / "c0ffee").symlink_to(f"../../blobs/ab/{xet}")
    (snapshot / "file").symlink_to("../../blobs/c0ffee")
    inside = Inside.of(snapshot)
    assert inside.blobs is not None and inside.read("file", limit=100) == b"content"
    (tmp_path / "secret").write_bytes(b"secret")
    for number, target in enumerate(
        ("../../secret", "../../blobs/ab/../../secret", str(tmp_path / "secret"))
    ):
        (repository / "blobs" / f"bad{number}").symlink_to(target)
        (snapshot / f"bad{number}").symlink_to(f"../../blobs/bad{number}")
        assert not isinstance(inside.read(f"bad{number}", limit=100), bytes)
    (store / ("ab" + "0" * 62)).symlink_to(tmp_path / "secret")  # in the store, but a link again
    (repository / "blobs" / "twice").symlink_to(f"../../blobs/ab/ab{'0' * 62}")
    (snapshot / "twice").symlink_to("../../blobs/twice")
    assert not isinstance(inside.read("twice", limit=100), bytes)
    assert Inside.of(tmp_path).blobs is None


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The same place that huggingface_hub takes, without importing it."""
    for name in [name for name in os.environ if name.startswith(("HF_", "HUGGINGFACE_", "XDG_"))]:
        monkeypatch.delenv(name)
    for variables in ({}, {"XDG_CACHE_HOME": "x"}, {"HF_HOME": "~/y"}, {"HF_HUB_CACHE": str(tmp_path / "z")}):
        told = subprocess.run(
            [sys.executable, "-c", "from huggingface_hub import constants as c; print(c.HF_HUB_CACHE)"],
            env={**os.environ, **variables},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            assert str(hub._cache()) == told
