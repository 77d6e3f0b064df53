"""Records of files, of items and of adapters."""

import msgspec

from common.wire.messages import LoraSpec


class UploadedAdapter(msgspec.Struct, frozen=True):
    """An adapter that its user has uploaded."""

    lora: LoraSpec
    shapes: dict[str, tuple[int, int]]  # (out, in) by the name of a module within a layer, as `mlp.up_proj`
    num_layers: int
    base_digest: str = ""  # of the base model that its configuration says; empty: it says none


class FileRecord(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # `file-…`
    tenant: str
    filename: str
    purpose: str
    created_at: int
    num_bytes: int
    num_items: int
    longest: dict[str, int] = {}  # base model -> tokens of the longest prompt; not for bases whose template refuses one
    tokens: dict[str, int] = {}  # base model -> tokens of all prompts and examples together, where `longest` has it
    num_examples: int = (
        0  # of the items: those with an answer to learn, for supervised jobs; of these `longest` counts it too
    )
    num_texts: int = 0  # of the examples: those of plain text
    fields: frozenset[str] = frozenset()  # some that all items have
    adapter: UploadedAdapter | None = None  # that the file holds; None: it holds items


def file_path(tenant: str, file: str) -> str:
    """The path of a file's items in object storage."""
    return f"files/{tenant}/{file}"


def uploaded_path(tenant: str, file: str) -> str:
    """The path of an uploaded adapter: not below `files`, because trainers may read it."""
    return f"brought/{tenant}/{file}"
