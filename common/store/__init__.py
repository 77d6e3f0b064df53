"""Object storage, and the versions of adapters in it.

    trainer ─ files, then the manifest ─► adapters ─► objects ─► a folder, S3 or memory ─► objects ─► adapters ─► rollout

Its files:

    adapters.py      commits versions of adapters: files first, then the manifest, which is created only once
    byte_cache.py    caches what was used last, up to a number of bytes
    disk_room.py     tells whether the disk of a local store has its reserve
    known_store.py   waits for the store that a cell knows
    objects.py       reads and writes object storage
    parts.py         hashes a file, and its parts for those who pass it on
    store_folder.py  tells a local store's folder from another in its place
"""
