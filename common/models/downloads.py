"""Tells how far the download of a base model is, by the files in Hugging Face's cache."""

from fnmatch import fnmatch
from pathlib import Path

from common.settings import MODEL_FILES


class Download:
    """One base model of the hub. Asks the hub once for the sizes of its files."""

    def __init__(self, where: str) -> None:
        """`where`: `owner/name` or `owner/name@revision`."""
        self._repo, _, revision = where.partition("@")
        self._where, self._revision = where, revision or None
        self._total: int | None = None

    def progress(self) -> str:
        """`downloading owner/name: 43% of 1.2 GB, 516 MB are here`; without the part if the hub does not say their size."""
        from huggingface_hub import constants, errors  # here, as in `settings`
        from huggingface_hub.file_download import repo_folder_name

        if self._total is None:
            try:
                self._total = self._size()
            except (OSError, ValueError, errors.HTTPError):  # pyright: ignore[reportPrivateImportUsage]
                self._total = 0
        total = self._total
        blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=self._repo, repo_type="model") / "blobs"
        done = sum(_size_of(file) for file in blobs.glob("*"))
        part = f"{min(1.0, done / total):.0%} of {total / 1e9:.1f} GB, " if total else ""
        return f"downloading {self._where}: {part}{done / 1e6:,.0f} MB are here"

    def _size(self) -> int:
        from huggingface_hub import HfApi

        files = HfApi().model_info(self._repo, revision=self._revision, files_metadata=True).siblings or []
        return sum(file.size or 0 for file in files if any(fnmatch(file.rfilename, pattern) for pattern in MODEL_FILES))


def _size_of(file: Path) -> int:
    try:
        return file.stat().st_size
    except FileNotFoundError:  # it has just become another file
        return 0
