"""What goes into the archive and what must not; the real archiver runs."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import package_archive
from scripts.package_archive import ArchiveOptions, PackagingError, handler_options, model_config, package
from tests.helpers.report import report

HANDLER_SOURCE = "import generation\n"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project with everything that must stay out of an archive."""
    root = tmp_path / "project"
    template = (package_archive.ROOT / "model-config.yaml").read_text(encoding="utf-8")
    files = {
        "model-config.yaml": template,
        "handler/llama_handler.py": HANDLER_SOURCE,
        "handler/ui/index.html": "<p>",
        "handler/key_file.json": "secret",
        "handler/tls.pem": "secret",
        "handler/.env": "secret",
        "model/llama.py": "",
        "model/csrc/kernels.c": "",
        "model/csrc/kernels.so": "built",
        "model/checkpoint/gguf/read.py": "",
        "model/__pycache__/llama.cpython-311.pyc": "",
        "generation/__init__.py": "",
        "generation/.git/config": "secret",
        "key_file.json": "secret",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    monkeypatch.setattr(package_archive, "ROOT", root)
    monkeypatch.setattr(package_archive, "HANDLER", root / "handler" / "llama_handler.py")
    return root


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "weights of mine"
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"\0" * 1000)
    (folder / "tokenizer" / "tokenizer.json").write_text("{}", encoding="utf-8")
    (folder / ".cache").mkdir()
    (folder / ".cache" / "token").write_text("secret", encoding="utf-8")
    return folder


CODE = {
    "MAR-INF/MANIFEST.json",
    "generation/__init__.py",
    "handler/llama_handler.py",
    "handler/ui/index.html",
    "llama_handler.py",
    "model-config.yaml",
    "model/checkpoint/gguf/read.py",
    "model/llama.py",
    "model/csrc/kernels.c",
}


def names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def config_of(archive: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((archive / "model-config.yaml").read_text(encoding="utf-8"))
    return config


@pytest.mark.usefixtures("root")
class TestPackage:
    @report("B146", "pytorch/serve#464")
    def test_folder_holds_the_code_and_no_secrets(self, tmp_path: Path, checkpoint: Path) -> None:
        archive = package(tmp_path / "store", ArchiveOptions(checkpoint, ranks=3))
        assert archive == tmp_path / "store" / "llama2"
        assert names(archive) == CODE
        config = config_of(archive)
        assert config["torchrun"]["nproc-per-node"] == 3
        assert config["handler"]["checkpoint"] == str(checkpoint)
        assert list((tmp_path / "store").iterdir()) == [archive], "nothing else is left in the model store"

    def test_mar_holds_the_same(self, tmp_path: Path, checkpoint: Path) -> None:
        archive = package(tmp_path, ArchiveOptions(checkpoint), name="other", version="2.1", archive_format="default")
        assert archive == tmp_path / "other.mar"
        with zipfile.ZipFile(archive) as file:
            assert {name for name in file.namelist() if not name.endswith("/")} == CODE
            assert '"modelVersion": "2.1"' in file.read("MAR-INF/MANIFEST.json").decode()

    def test_weights_inside(self, tmp_path: Path, checkpoint: Path) -> None:
        archive = package(tmp_path, ArchiveOptions(checkpoint, include_weights=True))
        inner = Path(config_of(archive)["handler"]["checkpoint"])
        assert not inner.is_absolute()
        assert names(archive / inner) == {"model.safetensors", "tokenizer/tokenizer.json"}
        assert not any(path.is_symlink() for path in archive.rglob("*"))

    def test_single_file_inside(self, tmp_path: Path, checkpoint: Path) -> None:
        weights = checkpoint / "model.safetensors"
        archive = package(tmp_path, ArchiveOptions(weights, include_weights=True))
        assert (archive / config_of(archive)["handler"]["checkpoint"]).read_bytes() == weights.read_bytes()

    def test_older_archive_is_replaced_whatever_its_format(self, tmp_path: Path, checkpoint: Path) -> None:
        """The archiver's own --force would leave files of the older one."""
        package(tmp_path, ArchiveOptions(checkpoint), archive_format="default")
        archive = package(tmp_path, ArchiveOptions(checkpoint))
        (archive / "stale.py").touch()
        package(tmp_path, ArchiveOptions(checkpoint))
        assert not (archive / "stale.py").exists()
        assert not (tmp_path / "llama2.mar").exists()

    def test_folder_that_is_no_archive_is_left_alone(self, tmp_path: Path, checkpoint: Path) -> None:
        mine = tmp_path / "llama2" / "mine.txt"
        mine.parent.mkdir()
        mine.touch()
        with pytest.raises(PackagingError, match="not a model archive"):
            package(tmp_path, ArchiveOptions(checkpoint))
        assert mine.exists()

    def test_mistake_in_the_settings_is_told_at_once(self, tmp_path: Path, checkpoint: Path) -> None:
        """B017: configuration is checked before anything is started."""
        options = ArchiveOptions(checkpoint, handler={"dtype": "bf16"})
        with pytest.raises(PackagingError, match=r"dtype.*bf16"):
            package(tmp_path / "store", options)
        assert list((tmp_path / "store").iterdir()) == []

    def test_bad_name_is_the_archivers_error(self, tmp_path: Path, checkpoint: Path) -> None:
        with pytest.raises(PackagingError, match="torch-model-archiver failed"):
            package(tmp_path, ArchiveOptions(checkpoint), name="two words")

    def test_unknown_format(self, tmp_path: Path, checkpoint: Path) -> None:
        with pytest.raises(PackagingError, match="archive format is 'tgz', expected one of no-archive, default"):
            package(tmp_path, ArchiveOptions(checkpoint), archive_format="tgz")


def test_missing_checkpoint_is_named(tmp_path: Path) -> None:
    with pytest.raises(PackagingError, match=r"nothing\.gguf does not exist"):
        ArchiveOptions(tmp_path / "nothing.gguf")


def test_ranks_limit(tmp_path: Path) -> None:
    with pytest.raises(PackagingError, match="ranks is 0, expected at least 1"):
        ArchiveOptions(tmp_path, ranks=0)


@pytest.mark.parametrize(
    ("device", "gpus", "kind"),
    [("cpu", 8, "cpu"), ("cuda", 0, "gpu"), ("auto", 0, "cpu"), ("auto", 1, "cpu"), ("auto", 2, "gpu")],
)
def test_device_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, gpus: int, kind: str) -> None:
    """The frontend hands out GPUs only where there is one for each rank."""
    monkeypatch.setattr(package_archive, "visible_gpus", lambda: gpus)
    template = yaml.safe_load((package_archive.ROOT / "model-config.yaml").read_text(encoding="utf-8"))
    before = yaml.safe_dump(template)
    assert model_config(template, ArchiveOptions(tmp_path, ranks=2, device=device))["deviceType"] == kind
    assert yaml.safe_dump(template) == before


def test_handler_options() -> None:
    options = handler_options(
        ["max_seq_len=2048", "log_prompts=true", "tokenizer=a=b"], dtype="float32", quantization=""
    )
    assert options == {"dtype": "float32", "max_seq_len": 2048, "log_prompts": True, "tokenizer": "a=b"}


def test_handler_option_without_value() -> None:
    with pytest.raises(PackagingError, match="'x', expected KEY=VALUE"):
        handler_options(["x"])
