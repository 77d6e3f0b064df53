"""A base model is its files, whatever its name: twins are told apart, and copies are one."""

import re
import shutil
import signal
import sys
from pathlib import Path

import pytest

from common.bus.bus import Bus
from common.errors import InvalidInput
from common.models.base_digest import SHOWN_DIGITS, BaseIdentity, base_digest, differ
from common.settings import TINY
from common.worker.membership import Membership
from tests.common.test_loading import heard
from tests.support.forked import begun

sys.path.insert(0, str(TINY.parent))
import make_tiny

SMALL = make_tiny.Shape(32, 1)


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Two base models that differ in their weights alone."""
    one, other = (tmp_path_factory.mktemp(name) for name in ("one", "other"))
    make_tiny.save(make_tiny.make_model(5, SMALL), one)
    make_tiny.save(make_tiny.make_model(6, SMALL), other)
    return one, other


def test_twins_differ_and_a_copy_elsewhere_does_not(twins: tuple[Path, Path], tmp_path: Path) -> None:
    one, other = map(base_digest, twins)
    assert differ(one, other)
    assert base_digest(shutil.copytree(twins[0], tmp_path / "copy")) == one
    texts = [base_digest(folder, with_weights=False) for folder in twins]
    assert texts[0] == texts[1] and not differ(texts[0], one), "who has no weights cannot tell them apart"


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_each_file_that_decides_what_a_model_says_is_part_of_its_identity(
    twins: tuple[Path, Path], tmp_path: Path, file: str
) -> None:
    changed = shutil.copytree(twins[0], tmp_path / "changed")
    (changed / file).write_text((changed / file).read_text() + " ")
    assert differ(base_digest(changed), base_digest(twins[0]))
    assert differ(base_digest(changed, with_weights=False), base_digest(twins[0]))


def test_of_a_large_model_little_is_read(tmp_path: Path) -> None:
    header = b"{}".ljust(100_000)
    for shard in range(4):
        with (tmp_path / f"model-{shard}.safetensors").open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.truncate(4 << 30)
    before = _bytes_read()
    digest = base_digest(tmp_path)
    assert _bytes_read() - before < 2 << 20
    with (tmp_path / "model-3.safetensors").open("r+b") as file:
        file.seek(-(4 << 20), 2)
        file.write(b"x" * (4 << 20))
    assert differ(base_digest(tmp_path), digest), "the last 64th of one file differs"
    with (tmp_path / "model-0.safetensors").open("r+b") as file:
        file.write(b"\xff" * 8)
    assert base_digest(tmp_path), "what is no safetensors file is told where it is loaded"


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


@pytest.mark.parametrize(
    ("own", "other", "fault"),
    [
        (("a", "t-1"), ("a", "t-1"), ""),
        (("a", "t-1"), ("renamed", "t-1"), ""),
        (("a", "t-1"), ("a", "t-2"), r"files of 'a' \(digest t-2\) than those of 'a' here \(t-1\): use it with"),
        (("a", "t-1"), ("", "t-2"), r"other files \(digest t-2\)"),
        (("a", "t-1"), ("b", ""), "was trained on 'b', not on 'a'"),
        (("a", "t-1"), ("a", ""), ""),
        (("a", "t-1"), ("", ""), ""),
        (("", ""), ("b", "t-2"), ""),
    ],
)
def test_digests_decide_and_names_only_where_one_has_none(
    own: tuple[str, str], other: tuple[str, str], fault: str
) -> None:
    if not fault:
        return BaseIdentity(*own).check("it", BaseIdentity(*other))
    with pytest.raises(InvalidInput, match=fault):
        BaseIdentity(*own).check("it", BaseIdentity(*other))


@pytest.mark.parametrize("service", ["env", "rollout", "trainer"])
async def test_a_twin_under_the_name_of_a_cells_base_model_waits_outside_and_says_why(
    service: str, twins: tuple[Path, Path], tmp_path: Path, bus: Bus, redis_url: str
) -> None:
    digest, name = base_digest(twins[0]), bus.cell.base_model
    first = Membership(bus, "rollout", deterministic=False, fingerprint="", fingerprints={}, digest=digest)
    await first.join()
    await bus.client.sadd(bus.cell.begun, "job-a")
    twin = twins[1]
    if service == "env":  # it sees the files without weights alone
        twin = shutil.copytree(twin, tmp_path / "twin")
        (twin / "tokenizer.json").write_text((twin / "tokenizer.json").read_text() + " ")
    variables = {
        "BASE_MODELS": f"{name}={twin}",
        "DATA_DIR": str(tmp_path),
        "REDIS_URL": redis_url,
        "WEAK_SANDBOX": "1",
    }
    worker = await begun(f"{service}_service", tmp_path / "log", **{f"MARLAAS_{k}": v for k, v in variables.items()})
    try:
        report = await heard(bus, lambda report: report.state == "refused")
    finally:
        worker.send_signal(signal.SIGKILL)
        await worker.wait()
    assert f"MARLAAS_BASE_MODELS calls {name} here is another than" in report.reason
    assert re.search(f"instead of {digest[:SHOWN_DIGITS]}.*a name of its own", report.reason)
