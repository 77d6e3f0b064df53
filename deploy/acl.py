"""The users of Redis: one for each service, with the commands and keys that its work needs and no others.

    user       reads and settles        appends to                                              besides
    manager    everything below `marlaas:`, for it alone knows jobs, tenants, keys and files
    exporter   exports, ends;           jobs:<p>, and a warning to the events of a job that has   keys of loggers, webhooks
               jobs and their events,   ended
               at its end
    env        env, env:*               rollout, rollout:first, scored:*, reply:*, dead,        follows control, keeps env-workers
                                        rollout:<worker>
    rollout    rollout, rollout:*       env, env:*, scored:*, reply:*, dead                     follows control, adapters:new,
                                                                                                keeps rollout-workers, hungry
    trainer    train, train:*           adapters:<p>, dead                                      follows control
    scaler     looks at the length of the work streams (autoscalers)
    health     PING
    operator   everything; no service uses it

Rollout workers alone keep `holders:*`, `peer-key` and `convoy:*`, by which they pass files on to each other. Every worker also keeps
`partial` and `looked` of the streams that it reads, appends to `telemetry`, joins its cell by `bits` and
`bits:live`, enters it by `open-at` and `opening` of its service, reads `weights`, reads and sets `store`, and sees whether `begun` is
empty. Env and rollout workers keep `history` together; rollout workers and trainers tell each other of places by `pool`.
The user `default` is off. Redis checks each call of a script like any other command, so EVALSHA gives no more than this.
Redis 7 keeps reading and appending apart; Redis 6.2 knows only whole keys, so there a worker may also read what it appends to.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from common.bus.streams import ALL_CELLS, NUM_PARTITIONS, Cell

SERVICES = ("manager", "exporter", "env", "rollout", "trainer")
USERS = (*SERVICES, "scaler", "health", "operator")
NOBODY = "user default off resetpass ~* &* +@all"
"""The user `default`, as whom nobody can log in. Redis 7 replays transactions of its append-only file under that name:
without rights it would leave them out, and lose at a restart what scripts wrote."""

_WORKER = """
    ping time cluster|slots eval evalsha script|load xgroup|create xreadgroup xautoclaim xpending xclaim xack xdel xadd xread
    xlen xrange xinfo|groups exists expire del get set setrange mget hget hset hdel hgetall
    zadd zcard zcount zscore zrem zremrangebyscore
"""
_ENV = "zrangebyscore rpush lrange"
_ROLLOUT = "info strlen rpush lrange zrangebyscore"
_MANAGER = """
    multi exec info memory|usage pttl
    xrevrange xtrim del exists expire get incr mget set hdel hget hexists hgetall hincrby hincrbyfloat
    hkeys hlen hmget hset hsetnx hstrlen hvals sadd sismember smembers srem zadd zcard zrange zremrangebyscore
"""

_EXPORTER = """
    ping time cluster|slots eval evalsha script|load
    get set pexpire hget hset hdel hexists hvals hgetall sismember xrange xadd zrange zrem
"""


@dataclass(frozen=True, slots=True)
class Rights:
    """The rights of one user. Keys are glob patterns."""

    commands: tuple[str, ...] = ()
    settles: tuple[str, ...] = ()  # keys that it reads and changes
    reads: tuple[str, ...] = ()
    appends: tuple[str, ...] = ()


def rights(user: str, base_models: Iterable[str]) -> Rights:
    """Raises KeyError for a name that is not in `USERS`."""
    cells = [_Keys(Cell(_literally(base))) for base in base_models]
    everything = {
        "manager": Rights(commands=tuple(f"{_WORKER} {_MANAGER}".split()), settles=("marlaas:*",)),
        "exporter": Rights(
            commands=tuple(_EXPORTER.split()),
            settles=("marlaas:{@}:loggers", "marlaas:{@}:exporter", *(key for keys in cells for key in keys.told)),
            reads=(
                *("marlaas:{@}:logger-keys:*", "marlaas:{@}:webhooks:*"),
                *(keys.cell.active(partition) for keys in cells for partition in range(NUM_PARTITIONS)),
            ),
            appends=tuple(keys.cell.jobs(partition) for keys in cells for partition in range(NUM_PARTITIONS)),
        ),
        "env": _worker([keys.env for keys in cells], _ENV),
        "rollout": _worker([keys.rollout for keys in cells], _ROLLOUT),
        "trainer": _worker([keys.trainer for keys in cells]),
        "scaler": Rights(("ping", "xlen", "xpending"), reads=tuple(key for keys in cells for key in keys.work)),
        "health": Rights(("ping",)),
        "operator": Rights(("@all",), settles=("*",)),
    }
    return everything[user]


def acl_file(passwords: Mapping[str, Iterable[str]], base_models: Iterable[str], *, redis_version: int = 7) -> str:
    """Redis' `aclfile` for these users. Several passwords of one user are all valid: so they are rotated.

    It holds hashes, not passwords.
    """
    bases = list(base_models)
    lines = [NOBODY]
    for user, valid in passwords.items():
        hashes = [f"#{hashlib.sha256(password.encode()).hexdigest()}" for password in valid]
        lines.append(" ".join(["user", user, "on", *hashes, *_rules(rights(user, bases), redis_version)]))
    return "\n".join(lines) + "\n"


def _rules(granted: Rights, redis_version: int) -> list[str]:
    split = redis_version >= 7
    keys = [f"~{key}" for key in granted.settles]
    keys += [f"{'%R~' if split else '~'}{key}" for key in granted.reads]
    keys += [f"{'%W~' if split else '~'}{key}" for key in granted.appends]
    channels = "allchannels" if "@all" in granted.commands else "resetchannels"
    return [channels, "-@all", *(f"+{command}" for command in granted.commands), *dict.fromkeys(keys)]


@dataclass(frozen=True, slots=True)
class _Keys:
    """The streams of one cell, by service."""

    cell: Cell

    @property
    def env(self) -> Rights:
        cell = self.cell
        back = cell.rollout_worker("rollout-*")  # as `worker_id` names workers: no chat's stream
        outputs = (cell.rollout, cell.rollout_first, back, *self._scored, cell.reply("*"))
        rights = self._member("env", (cell.env, cell.env_worker("*")), reads=(cell.control,), appends=outputs)
        return replace(rights, settles=(*rights.settles, cell.history("*"), cell.env_workers))

    @property
    def rollout(self) -> Rights:
        cell = self.cell
        rights = self._member(
            "rollout",
            (cell.rollout, cell.rollout_worker("*")),
            reads=(cell.control, cell.adapters_new),
            appends=(cell.env, cell.env_worker("*"), *self._scored, cell.reply("*")),
        )
        own = (cell.rollout_workers, cell.hungry, cell.moved(cell.rollout_worker("*"), "*"))
        relay = (cell.holders("*"), cell.peer_key, cell.convoy("*"))
        return replace(rights, settles=(*rights.settles, cell.history("*"), *own, *relay))

    @property
    def trainer(self) -> Rights:
        cell = self.cell
        updates = tuple(cell.adapters(partition) for partition in range(NUM_PARTITIONS))
        return self._member("trainer", (cell.train, cell.trainer("*")), reads=(cell.control,), appends=updates)

    @property
    def told(self) -> tuple[str, ...]:
        """Keys that the exporter reads, and changes: of a job that has ended, and which store the cell knows."""
        cell = self.cell
        return (cell.exports, cell.ends, cell.job("*"), cell.events("*"), cell.store)

    @property
    def work(self) -> tuple[str, ...]:
        return tuple(stream for stream, _ in self.cell.work)

    @property
    def _scored(self) -> tuple[str, ...]:
        return tuple(self.cell.scored(partition) for partition in range(NUM_PARTITIONS))

    def _member(
        self, service: str, settles: tuple[str, ...], reads: tuple[str, ...], appends: tuple[str, ...]
    ) -> Rights:
        """A worker's rights, with what it needs to take over, to join and enter the cell and to report."""
        cell = self.cell
        beside = [key for stream in settles for key in (cell.partial(stream, "*"), cell.looked(stream))]
        return Rights(
            settles=(
                *(*settles, *beside, cell.bits, cell.bits_live, cell.store),
                *(cell.open_at(service), cell.opening(service)),
                *([] if service == "env" else [ALL_CELLS.pool(service)]),
            ),
            reads=(*reads, cell.begun, cell.weights),
            appends=(*appends, cell.dead, cell.telemetry),
        )


def _worker(cells: list[Rights], commands: str = "") -> Rights:
    """A worker's rights in several cells. `commands`: those that other workers do not need."""
    return Rights(
        commands=tuple(f"{_WORKER} {commands}".split()),
        settles=tuple(key for cell in cells for key in cell.settles),
        reads=tuple(key for cell in cells for key in cell.reads),
        appends=tuple(key for cell in cells for key in cell.appends),
    )


def _literally(name: str) -> str:
    """A base model's name as a glob pattern that matches it alone."""
    return "".join(f"\\{char}" if char in "*?[]\\" else char for char in name)
