"""The loop of a manager replica: reads its partitions' messages, commits changed records and new work by one script.

    leases ─ mine ─► partition: read ─► jobs change ─► scheduling decides ─► transaction: commit, if the lease still holds

After a crash another replica takes the leases, and rebuilds each partition from Redis.

Its files:

    owner.py          runs the loop: reads, lets jobs change, asks what follows, commits
    partition.py      holds the jobs of one partition, and applies messages to them
    arriving.py       takes in jobs, once their files are read
    leases.py         shares the partitions among the live owners
    big_steps.py      writes big TrainSteps to object storage before they are published
    sample_writer.py  writes samples to object storage
    surroundings.py   follows tenants, quotas and memory, and trims broadcasts
    transaction.py    writes a pass's changes by one script that first compares the lease
    jobs/             one job: a state machine of events in, Changes out
    runs/             jobs whose loop their user keeps, through the Tinker protocol
    archiver.py       copies a finished job's records to the archive, and tells the owner what to delete in Redis
    job_reader.py     reads jobs: records, files on this machine's disk, versions that only the store knows
"""
