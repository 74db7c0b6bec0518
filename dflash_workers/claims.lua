-- Who works on which batch. One script, so that each verb happens at once or not at all.
--
--   KEYS[1]  pending:<run>      sorted set  batch -> since when (ms)
--   KEYS[2]  inflight:<run>     sorted set  batch -> deadline (ms)
--   KEYS[3]  lease:<run>:<b>    string      the holder's attempt id; expires with the deadline
--   KEYS[4]  journal:<run>:<b>  hash        turns, finished and not
--   KEYS[5]  suspects:<run>:<b> hash        who was in an engine that died
--   ARGV     verb, batch, then what the verb names
--
-- A batch is held exactly while its lease exists. A deadline that is over means: hand it over.
-- Time is Redis' own, so that no two machines' clocks are compared.

local pending, inflight, lease, journal, suspects = unpack(KEYS)
local verb, batch = ARGV[1], ARGV[2]
local time = redis.call('TIME')
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)

local function hold(attempt, lease_ms)
  redis.call('SET', lease, attempt, 'PX', lease_ms)
  redis.call('ZREM', pending, batch)
  redis.call('ZADD', inflight, now_ms + lease_ms, batch)
end

local verbs = {}

-- Safe to repeat with the same attempt: a reply may get lost.
function verbs.claim(attempt, lease_ms)
  local holder = redis.call('GET', lease)
  if holder and holder ~= attempt then return 'lost' end
  hold(attempt, lease_ms)
  return 'held'
end

-- Lapsed, or cleared by whoever committed: taken again, and the holder must look at everything anew.
function verbs.renew(attempt, lease_ms)
  local holder = redis.call('GET', lease)
  if holder and holder ~= attempt then return 'lost' end
  local unbroken = holder and redis.call('ZSCORE', inflight, batch)
  hold(attempt, lease_ms)
  return unbroken and 'held' or 'again'
end

-- First step of a hand-over by the holder. The lease goes before anybody hears of the batch, or
-- the one who hears first would find it held and drop it.
function verbs.release(attempt, handover_ms)
  if redis.call('GET', lease) ~= attempt then return 0 end
  redis.call('DEL', lease)
  redis.call('ZADD', inflight, now_ms + handover_ms, batch)
  return now_ms + handover_ms
end

-- First step of a hand-over by anybody: the batches whose deadline is over, behind the new one.
function verbs.reap(limit, handover_ms)
  local overdue =
    redis.call('ZRANGEBYSCORE', inflight, '-inf', '(' .. now_ms, 'LIMIT', 0, limit)
  for _, name in ipairs(overdue) do
    redis.call('ZADD', inflight, now_ms + handover_ms, name)
  end
  table.insert(overdue, 1, now_ms + handover_ms)
  return overdue
end

-- Last step of a hand-over, after the hint was sent. A claim in between has moved the deadline.
function verbs.settle(deadline_ms)
  if tonumber(redis.call('ZSCORE', inflight, batch)) ~= tonumber(deadline_ms) then return 0 end
  redis.call('ZREM', inflight, batch)
  redis.call('ZADD', pending, now_ms, batch)
  return 1
end

-- Only once a commit stands or the run is cancelled. Another's lease stays; with its deadline
-- gone, its next renewal answers 'again', upon which that holder asks S3, sees the commit and stops.
function verbs.clear(attempt)
  if redis.call('GET', lease) == attempt then redis.call('DEL', lease) end
  redis.call('ZREM', pending, batch)
  redis.call('ZREM', inflight, batch)
  redis.call('DEL', journal, suspects)
  return 1
end

return verbs[verb](unpack(ARGV, 3))
