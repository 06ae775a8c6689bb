"""Read a checkpoint of ``torch.distributed.checkpoint`` without running code that somebody wrote into it.

The table of contents of a checkpoint is a pickle, which torch reads without restrictions: it can run code, and it can name any
file of the machine. The reader of this module accepts torch's own descriptions of tensors, and files in the folder of the
checkpoint, and nothing else.
"""

from __future__ import annotations

import pickle
import re
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

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


class _Unpickler(pickle.Unpickler):
    """Loads the names of :data:`DESCRIPTIONS` and torch's dtypes, and refuses all others."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and (name == "Size" or isinstance(getattr(torch, name, None), torch.dtype)):
            return getattr(torch, name)
        if name in DESCRIPTIONS.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which describes no tensor")


class RestrictedReader(FileSystemReader):
    """torch's reader of a checkpoint, restricted to tensors in files of the checkpoint's own folder."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the table of contents.

        Raises:
            ValueError: it is damaged, or has anything but descriptions of tensors; the message names what it has.
        """
        path = self._get_metadata_path(kwargs.get("rank"))
        try:
            with open(path, "rb") as file:
                table = _Unpickler(file).load()
            _require_tensors(table)
        except (pickle.UnpicklingError, ValueError, EOFError, AttributeError, TypeError, KeyError, IndexError) as err:
            raise ValueError(f"load: {path} is damaged, or was made to do harm: {err}; nothing was read") from None
        # As torch's own method does behind reading.
        table.storage_meta = metadata.StorageMeta(load_id=self.load_id)
        return table


def _require_tensors(table: Any) -> None:
    """Refuse a table of contents with entries that are not tensors, or with files outside of the folder.

    Raises:
        ValueError: naming the entry.
    """
    if not isinstance(table, Metadata) or not isinstance(table.storage_data, dict):
        raise ValueError("it is no table of contents")
    for name, about in table.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(about, TensorStorageMetadata):
            raise ValueError(f"{name!r} is no tensor, and would be unpickled")
    for place in table.storage_data.values():
        inside = isinstance(place, filesystem._StorageInfo) and FILE.fullmatch(str(place.relative_path)) is not None
        if not inside or place.transform_descriptors:
            raise ValueError(f"it names the file {getattr(place, 'relative_path', place)!r}")
