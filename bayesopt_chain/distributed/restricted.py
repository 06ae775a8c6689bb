"""Read a checkpoint of ``torch.distributed.checkpoint`` without running code that somebody wrote into it.

The table of contents of a checkpoint is a pickle, which torch reads without restrictions: it can run code, and it can name any
file of the machine. The reader of this module accepts torch's own descriptions of tensors, and regular files in the folder of
the checkpoint, and nothing else.
"""

from __future__ import annotations

import io
import pickle
import re
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

# By module, the classes and functions that a table of contents of tensors needs.
DESCRIPTIONS = {
    "torch.distributed.checkpoint.metadata": (
        "Metadata",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "ChunkStorageMetadata",
        "MetadataIndex",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
    "pathlib": ("Path", "PosixPath", "PurePosixPath"),
    # Python 3.13 pickles paths under this name.
    "pathlib._local": ("Path", "PosixPath", "PurePosixPath"),
}
FILE = re.compile(r"__\d+_\d+\.distcp")  # the files that DCP writes, which have no folder in their names


# The unpickler that is written in Python. The one in C allocates as much memory as a damaged file asks for.
_InPython: Any = vars(pickle)["_Unpickler"]


class _Unpickler(_InPython):
    """Loads the names of :data:`DESCRIPTIONS` and torch's dtypes, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if name in DESCRIPTIONS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no tensor")

    def load_build(self) -> None:
        """Set the attributes of an object, and never those of a class, which would outlive the reading."""
        if isinstance(self.stack[-2], type):
            raise pickle.UnpicklingError(f"it changes {self.stack[-2].__name__}")
        super().load_build()

    dispatch: ClassVar[dict[int, Any]] = {**_InPython.dispatch, pickle.BUILD[0]: load_build}


class RestrictedReader(FileSystemReader):
    """torch's reader of a checkpoint, restricted to tensors in files of the checkpoint's own folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the table of contents.

        Raises:
            ValueError: it is damaged, or has anything but descriptions of tensors; the message names what it has.
        """
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            table = _Unpickler(io.BytesIO(path.read_bytes())).load()
            _require_tensors(path.parent, table)
        except Exception as err:  # a damaged pickle can end in any of them
            raise ValueError(
                f"load: {path} is damaged, or was made to do harm: {type(err).__name__}: {err}; nothing was read"
            ) from None
        # As torch's own method does behind reading.
        table.storage_meta = StorageMeta(load_id=self.load_id)
        return table


def _require_tensors(folder: Path, table: Any) -> None:
    """Refuse a table of contents with entries that are not tensors, or whose files are not there.

    Args:
        folder: of the checkpoint.
        table: what was read.

    Raises:
        ValueError: naming the entry.
    """
    if not isinstance(table, Metadata):
        raise ValueError("it is no table of contents")
    for name, about in table.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(about, TensorStorageMetadata):
            raise ValueError(f"{name!r} is no tensor, and would be unpickled")
    for place in (table.storage_data or {}).values():
        file = str(place.relative_path)
        if not FILE.fullmatch(file) or not (folder / file).is_file() or place.transform_descriptors:
            raise ValueError(f"it names {file!r}, which is no file of pieces that is there")
