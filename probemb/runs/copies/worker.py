"""Reads and writes a copy of a run through fsspec, in a process of its own; see `store.Store`.

    worker.py COMMAND ADDRESS ARGUMENT ...

Prints a NUL for every piece of work, as a sign of life, and then the result as JSON. Imports nothing of the project: a
process runs its text.
"""

import json
import os
import sys

import fsspec

BLOCK = 4 << 20
MARKER = "state.json"  # written last and removed first: a folder with it is complete
OBJECTS = {"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "oci"}  # have no folders to make


def alive():
    sys.stdout.write("\0")
    sys.stdout.flush()


def copy(source, target):
    while block := source.read(BLOCK):
        target.write(block)
        alive()


class Copy:
    def __init__(self, address):
        self.files, self.root = fsspec.url_to_fs(address)
        kinds = self.files.protocol
        self.has_folders = not OBJECTS & set([kinds] if isinstance(kinds, str) else kinds)

    def path(self, *names):
        return "/".join((self.root.rstrip("/"), *names))

    def try_writing(self):
        """A small file, which is removed again."""
        path = self.path(".writable")
        if self.has_folders:
            self.files.makedirs(self.root, exist_ok=True)
        self.files.pipe_file(path, b"")
        self.files.rm_file(path)

    def list(self):
        """Sizes by name, by name of every complete checkpoint."""
        self.files.invalidate_cache()
        found = {}
        try:
            entries = self.files.find(self.path("checkpoints"), detail=True)
        except FileNotFoundError:
            entries = {}
        for path, about in entries.items():
            *_, folder, name = path.split("/")
            found.setdefault(folder, {})[name] = about["size"]
        return {folder: names for folder, names in found.items() if MARKER in names}

    def put(self, source, *names):
        """A file, whole or not at all: objects appear when they are complete, and files get their name then."""
        target = self.path(*names)
        aside = f"{target}.partial" if self.has_folders else target
        if self.has_folders:
            self.files.makedirs(target.rpartition("/")[0], exist_ok=True)
        write = self.files.open(aside, "wb")
        try:
            with open(source, "rb") as read:
                copy(read, write)
        except BaseException:
            if self.has_folders:
                write.close()
            else:
                write.discard()
                write.closed = True  # or what is left of it is uploaded when the object is dropped
            raise
        write.close()
        if self.has_folders:
            try:
                self.files.mv(aside, target)
            except OSError:  # it may be a file system that replaces nothing
                if not (self.files.exists(aside) and self.files.exists(target)):
                    raise
                self.files.mv(target, f"{target}.old")
                self.files.mv(aside, target)
                self.files.rm_file(f"{target}.old")

    def put_checkpoint(self, folder):
        """A folder, under its own name; its marker last."""
        own = ("checkpoints", os.path.basename(folder))
        marker = self.path(*own, MARKER)
        if self.files.exists(marker):
            self.files.rm_file(marker)
        for name in sorted(os.listdir(folder), key=lambda name: name == MARKER):
            self.put(os.path.join(folder, name), *own, name)

    def put_files(self, *sources):
        """Files beside the checkpoints; those that do not exist are left out."""
        for source in filter(os.path.isfile, sources):
            self.put(source, os.path.basename(source))

    def get(self, target, *names):
        """Files to a folder; those that do not exist are left out."""
        for name in names:
            path = self.path(name)
            if self.files.exists(path):
                here = os.path.join(target, os.path.basename(name))
                with self.files.open(path, "rb") as read, open(here, "wb") as write:
                    copy(read, write)

    def remove(self, *folders):
        """Checkpoints; their markers first."""
        for folder in folders:
            path = self.path("checkpoints", folder)
            if self.files.exists(f"{path}/{MARKER}"):
                self.files.rm_file(f"{path}/{MARKER}")
            alive()
            self.files.rm(path, recursive=True)


def main():
    command, address, *rest = sys.argv[1:]
    print(json.dumps(getattr(Copy(address), command)(*rest)), flush=True)


if __name__ == "__main__":
    main()
