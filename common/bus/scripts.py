"""The scripts of the bus. Redis runs each as one, and nothing else meanwhile."""

# Settles inputs: publishes what each led to, and acknowledges it.
# KEYS: none named (all keys share the cell's hash tag, KEYS[1] routes). ARGV: the prefix of the cell's keys, number of inputs, then
# for each input: stream, group, entry, number of outputs (-1: the entry once more, as it is), name of its history ("": none), what
# becomes of that ("on": the entry's payload, then its id, are its next item; "ends": it is deleted), then for each output: stream,
# the stream in its place if it does not exist ("=": the same, "": none), number of fields, fields. Streams are named without the
# prefix; "" is the one before, of an input with the same group.
# Returns for each input its outputs' entries, nil for one that went nowhere; 0 if it is not pending.
SETTLE = """
local at = 1
local function take() at = at + 1; return ARGV[at - 1] end
local cell, num, settled = take(), tonumber(take()), {}
local input, group, output
for n = 1, num do
  local name = take()
  if name ~= '' then input, group = name, take() end
  local stream, entry, outputs = cell .. input, take(), tonumber(take())
  local history, becomes, entries = cell .. 'history:' .. take(), take(), {}
  local progress = cell .. 'partial:' .. input .. ':' .. entry
  -- Is this entry still pending? Asked for each id: after a take-over two workers may settle it, and a lost reply repeats the script.
  -- Only the first publishes. (XACK's count would say the same, but too late: the outputs stand before it.) No group: not pending.
  local rows = redis.pcall('XPENDING', stream, group, entry, entry, 1)
  if rows.err and not string.find(rows.err, 'NOGROUP', 1, true) then return rows end
  local open = #rows == 1
  -- Above its memory limit Redis refuses a script's first write if that needs memory, and none after it: so the DEL comes first.
  if open then redis.call('DEL', progress, progress .. ':by', unpack(becomes == 'ends' and {history} or {})) end
  if open and (outputs < 0 or becomes == 'on') then
    local fields = (redis.call('XCLAIM', stream, group, rows[1][2], 0, entry)[1] or {nil, {}})[2]
    if outputs < 0 and #fields > 0 then redis.call('XADD', stream, '*', unpack(fields)) end
    for i = 1, becomes == 'on' and #fields or 0, 2 do
      if fields[i] == 'payload' then redis.call('RPUSH', history, fields[i + 1], entry) end
    end
  end
  -- Outputs before the acknowledgement: a script that fails is not rolled back, and a failure between them must not lose the input.
  for _ = 1, outputs do
    local to, instead, words = take(), take(), tonumber(take())
    if to ~= '' then output = to end
    local fields, there = {unpack(ARGV, at, at + words - 1)}, false
    if instead == '=' then instead = output end
    if open and output ~= instead then there = redis.call('XADD', cell .. output, 'NOMKSTREAM', '*', unpack(fields)) end
    if open and instead ~= '' and not there then there = redis.call('XADD', cell .. instead, '*', unpack(fields)) end
    entries[#entries + 1] = there
    at = at + words
  end
  -- XACK alone would leave the entry in the stream, XDEL alone its id among the pending. Together: a stream's length is its open work.
  if open then
    redis.call('XACK', stream, group, entry)
    redis.call('XDEL', stream, entry)
  end
  settled[n] = open and entries or 0
end
return settled
"""

# Creates a group. KEYS[1] stream. ARGV: group, seconds after which the stream expires ("": never), MKSTREAM to make the stream too.
# The first write needs no memory, as in SETTLE.
CREATE_GROUP = """
redis.call('XDEL', KEYS[1], '0-0')
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], '0', unpack(ARGV, 3))
if ARGV[2] ~= '' then redis.call('EXPIRE', KEYS[1], ARGV[2]) end
return made
"""

# Appends to a broadcast. KEYS: none named, for that would take the right to read the stream. ARGV: stream, seconds to keep entries,
# then a new one's fields. The first write needs no memory, as in SETTLE.
BROADCAST = """
local oldest = (redis.call('TIME')[1] - ARGV[2]) * 1000
redis.call('XDEL', ARGV[1], '0-0')
redis.call('XADD', ARGV[1], 'MINID', '~', string.format('%.0f', oldest), '*', unpack(ARGV, 3))
"""

# Reads streams in order, by one call: between several a new entry of an earlier stream would come second.
# KEYS: streams. ARGV: group, consumer, entries together, key in which a consumer that found fewer says so, for PASS_ON ("": none).
# Returns what each stream gave, earlier streams first.
READ_IN_ORDER = """
local left, found = tonumber(ARGV[3]), {}
for i, stream in ipairs(KEYS) do
  if left > 0 then
    local read = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', left, 'STREAMS', stream, '>')
    if read then
      found[#found + 1] = read[1]
      left = left - #read[1][2]
    end
  end
end
if ARGV[4] ~= '' then
  redis.call('HDEL', ARGV[4], ARGV[2])
  if left > 0 then redis.call('HSET', ARGV[4], ARGV[2], left .. ' ' .. redis.call('TIME')[1] + 2) end
end
return found
"""

# Resets the idle time of entries that the consumer still owns, and writes their new progress. KEYS[1] stream. ARGV: group, consumer,
# then for each entry: id, and of its progress key, head, start of the tail, tail ("": nothing new). It expires after a day.
RENEW = """
local renewed = 0
for i = 3, #ARGV, 5 do
  local entry, progress, head, start, tail = unpack(ARGV, i, i + 4)
  local row = redis.call('XPENDING', KEYS[1], ARGV[1], entry, entry, 1)[1]
  -- Whoever lost the entry to another worker must neither take it back nor write over that worker's progress.
  if row and row[2] == ARGV[2] then
    redis.call('XCLAIM', KEYS[1], ARGV[1], ARGV[2], 0, entry, 'JUSTID')
    -- A Redis that went back in time may have lost the bytes before this tail: then what it has stands. `:by` says by which delivery
    -- progress came: an entry whose last worker advanced is no suspect (takeover.py).
    start = tonumber(start)
    if tail ~= '' and (start == #head or redis.call('STRLEN', progress) >= start) then
      redis.call('SETRANGE', progress, 0, head)
      redis.call('SETRANGE', progress, start, tail)
      redis.call('EXPIRE', progress, 86400)
      redis.call('SET', progress .. ':by', row[4], 'EX', 86400)
    end
    renewed = renewed + 1
  end
end
return renewed
"""

# Finds entries that nobody renewed. KEYS[1] stream. ARGV: group, milliseconds that an entry must be idle, how many, key of the mark,
# milliseconds that it lasts, prefix of an entry's key of progress, then the entries that the caller works on.
# Returns their rows, each with the number of the delivery that last saved progress.
FIND_IDLE = """
local most, lasts = tonumber(ARGV[3]), tonumber(ARGV[5])
redis.call('XDEL', KEYS[1], '0-0')  -- a first write that needs no memory, as in SETTLE
-- To look means a walk over all pending entries: one worker does it for all while the mark lasts.
if lasts > 0 and not redis.call('SET', ARGV[4], '1', 'NX', 'PX', ARGV[5]) then return {} end
local own, found, keys, start, hangs = {}, {}, {}, '-', false
for i = 7, #ARGV do own[ARGV[i]] = true end
repeat
  local rows = redis.call('XPENDING', KEYS[1], ARGV[1], 'IDLE', ARGV[2], start, '+', most)
  for _, row in ipairs(rows) do
    start = '(' .. row[1]
    if own[row[1]] then hangs = true else found[#found + 1] = row end
  end
until #found > 0 or #rows < most
-- A worker whose own work hangs leaves that to others, and so the mark too: it might be the first to look each time.
if hangs then redis.call('DEL', ARGV[4]) end
for i, row in ipairs(found) do keys[i] = ARGV[6] .. row[1] .. ':by' end
for i, by in ipairs(#keys > 0 and redis.call('MGET', unpack(keys)) or {}) do found[i][5] = by or '0' end
return found
"""

# Registers an env worker: makes its stream, which only it does, and moves the streams of gone workers to the stream of all. KEYS:
# sorted set of the env workers with a stream, by when they count as gone, ms; the stream of all. ARGV: worker, milliseconds until it
# counts as gone (less than 0: it leaves), prefix of a worker's stream, prefix of the mark of those who look for idle entries; group.
# Returns whether the worker was not in the set, or was being emptied, and whether more is to be moved. The first write needs no
# memory, as in SETTLE.
ATTEND = """
local workers, worker, hold = KEYS[1], ARGV[1], tonumber(ARGV[2])
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local till = tonumber(redis.call('ZSCORE', workers, worker) or 0)
local absent = till == 0 and 1 or 0
redis.call('ZREM', workers, worker)
redis.call('ZADD', workers, now + hold, worker)
if hold >= 0 then redis.pcall('XGROUP', 'CREATE', ARGV[3] .. worker, ARGV[5], '0', 'MKSTREAM') end
local gone = redis.call('ZRANGEBYSCORE', workers, '-inf', '(' .. now)
if hold < 0 then
  gone = {worker}
elseif till < now then
  -- It comes late itself, so it cannot tell whether others are gone or were kept from Redis as it was: they have as long again.
  for _, other in ipairs(absent == 0 and redis.call('ZRANGEBYSCORE', workers, '(0', '(' .. now) or {}) do
    redis.call('ZADD', workers, now + hold, other)
  end
  return {absent, 0}
end
if #gone == 0 then return {absent, 0} end
local stream = ARGV[3] .. gone[1]
local entries = redis.call('XRANGE', stream, '-', '+', 'COUNT', 100)
for _, entry in ipairs(entries) do
  redis.call('XADD', KEYS[2], '*', unpack(entry[2]))
  redis.call('XACK', stream, ARGV[5], entry[1])
  redis.call('XDEL', stream, entry[1])
end
if #entries == 100 then
  redis.call('ZADD', workers, 0, gone[1])
  return {absent, 1}
end
redis.call('DEL', stream, ARGV[4] .. gone[1])
redis.call('ZREM', workers, gone[1])
return {absent, #gone > 1 and 1 or 0}
"""

# Says that a worker with streams of its own is there. KEYS: sorted set of these workers. ARGV: group, worker, milliseconds until it
# counts as gone, milliseconds of a lease, its streams. If work of theirs hangs it counts as gone at once: so others take that over.
# Returns the others that are gone.
ATTEND_OWN = """
local time, hold = redis.call('TIME'), ARGV[3]
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 5, #ARGV do
  local idle = redis.pcall('XPENDING', ARGV[i], ARGV[1], 'IDLE', ARGV[4], '-', '+', 1, ARGV[2])
  if #idle > 0 then hold = 0 end
end
redis.call('ZREM', KEYS[1], ARGV[2])  -- a first write that needs no memory, as in SETTLE
redis.call('ZADD', KEYS[1], now + hold, ARGV[2])
return redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', '(' .. now)
"""

# Passes on what waits in a worker's own streams. KEYS: `hungry`, sorted set of the workers with such streams. ARGV: group, consumer, how
# many at most (-1: as many as hungry workers have room for), the worker whose streams they are, if it has gone: its empty ones are
# deleted ("": it has not), prefixes of keys that say what went where, and of streams, then the name of each stream and of that to which
# its entries go. Returns how many were passed on.
PASS_ON = """
local most, gone, told, moved, left = tonumber(ARGV[3]), ARGV[4], {}, 0, 0
redis.call('HDEL', KEYS[1], most < 0 and ARGV[2] or '')  -- whoever asks for the hungry is none
if most < 0 then
  local now = tonumber(redis.call('TIME')[1])
  most, told = 0, redis.call('HGETALL', KEYS[1])
  for i = 2, #told, 2 do
    local free, till = string.match(told[i], '^(%d+) (%d+)$')
    told[i] = {tonumber(till) < now and 0 or tonumber(free), till}
    most = most + told[i][1]
  end
end
for i = 7, #ARGV, 2 do
  local from, to = ARGV[6] .. ARGV[i], ARGV[6] .. ARGV[i + 1]
  local count = {'COUNT', most - moved, 'STREAMS', from, '>'}
  local read = most > moved and redis.pcall('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], unpack(count)) or {}
  for _, entry in ipairs(not read.err and read[1] and read[1][2] or {}) do
    local now = to .. ' ' .. redis.call('XADD', to, '*', unpack(entry[2]))
    redis.call('SET', ARGV[5] .. ARGV[i] .. ':' .. entry[1], now, 'EX', 60)
    redis.call('XACK', from, ARGV[1], entry[1])
    redis.call('XDEL', from, entry[1])
    moved = moved + 1
  end
  if gone ~= '' and redis.call('XLEN', from) == 0 then redis.call('DEL', from) else left = left + 1 end
end
if gone ~= '' and left == 0 then redis.call('ZREM', KEYS[2], gone) end
local taken = moved
for i = 1, #told, 2 do
  local free, till = unpack(told[i + 1])
  local part = math.min(free, taken)
  if free > part then redis.call('HSET', KEYS[1], told[i], free - part .. ' ' .. till) else redis.call('HDEL', KEYS[1], told[i]) end
  taken = taken - part
end
return moved
"""
