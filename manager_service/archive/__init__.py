"""Records of finished jobs, kept in object storage, so that Redis holds only what happens now.

    owner ─ a job that has finished ─► archiver ─ its records ─► store ◄─ whoever asks ─ api
                                           │
                                           └─ Moved ─► the owner's script deletes them in Redis

Its files:

    store.py      writes and reads the records of finished jobs, by tenant and job
    samples.py    writes, reads and deletes the samples of jobs, which owners write while those run
    archiver.py   reads a finished job's records in Redis, and says what the owner deletes there
"""
