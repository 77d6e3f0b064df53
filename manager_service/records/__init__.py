"""The manager's records: every key in one place, one file a kind. HTTP routes and owners both read them; all records are JSON.

in the cell (see common.bus.streams)
job:<job>                  hash     `spec`: JobSpec, written once by the API; `state`: JobState, only by the owner;
                                    `deleted`: the user deleted its model; `moving`: it is being archived, and must not change
unfinished:<tenant>        hash     job -> bytes of `spec` and `state` when it was created, until it has finished
finished:<p>               zset     jobs to be archived (archive.py) by when they finished, seconds since 1970
num-archived               string   how many jobs are in the archive
exports                    hash     job -> tenant: jobs whose figures a logger still waits for (manager_service/export)
ends                       zset     `<tenant> <job>` by when it ended: what webhooks are to hear; for three days at most
ledger:<job>               hash     issued, trained, filtered, stale, failed, cancelled
open:<job>                 hash     TrajectoryKey -> OpenTrajectory (owner/jobs/open_trajectories.py); its size is in_flight
evals:<job>                hash     TrajectoryKey -> attempt, of evaluations, which the ledger does not count
checkpoints:<job>          hash     version -> CheckpointRecord
events:<job>               stream   field `event`: EventRecord; entry id `<sequence>-0`
usage:<tenant>             hash     `<job>/<counter>` -> amount; job `-` is inference, `archived` all archived jobs together
run:<run>                  hash     `spec`, `state`: run_records.py has these and the other keys of runs

outside the cells, prefix `marlaas:{@}:`
tenants                    hash     tenant -> TenantRecord
keys                       hash     sha256 of the key -> KeyRecord
logger-keys:<tenant>       hash     logger -> LoggerKey
webhooks:<tenant>          hash     webhook -> Webhook
loggers                    string   names of the loggers that are installed where the exporter runs, JSON
exporter                   string   the exporter that works (manager_service/export/lease.py)
file:<file>                string   FileRecord; content is in object storage at `files/{tenant}/{file}`
files:<tenant>             zset     file id by creation time
file-bytes:<tenant>        hash     file id -> bytes

Its files:

    archive.py         writes and reads the records of finished jobs, by tenant and job
    cluster.py         tells who is alive, and who worked for whom when, from the workers' telemetry
    file_records.py    records of files, of items and of adapters
    job_records.py     records of jobs
    keys.py            names of the records outside the cells, and how records are read
    receivers.py       records of where a tenant's jobs report to, and who keeps them
    run_records.py     names what Redis keeps of a run
    sample_records.py  records of events, versions and samples, and the bound on what is kept of them
    stored.py          counts the bytes that tenants keep in object storage
    tenants.py         records of tenants and keys, and who keeps them; refuses a Redis that another version wrote
    usage.py           names the counters of tenants' usage, and lists those that quotas count
"""
