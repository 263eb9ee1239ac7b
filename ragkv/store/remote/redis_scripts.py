"""What must happen in one step on a Redis server, as Lua.

The accounting lies next to the values, so that it is right with any number of writers. It is a hash of sizes,
`key -> bytes:groups`, whose field "" is the sum of the bytes and "." the number of scores, and a sorted set of keys by
the time of last use.
Values have a time to live and the accounting has none: under the policy `volatile-lru` the server evicts values alone.
One script touches all keys of a tenant, so Redis Cluster is not supported.
"""

# `FUNCTIONS` stand before every script. KEYS: sizes, uses.
# ARGV[1]: how every value's name begins, "<prefix>:<tenant>:v:"
FUNCTIONS = """
local sizes, uses, root = KEYS[1], KEYS[2], ARGV[1]
local function now()
  local t = redis.call('TIME')
  return t[1] * 1000000 + t[2]
end
local function held(key)
  local row = redis.call('HGET', sizes, key)
  if not row then return nil, nil end
  local bytes, groups = string.match(row, '^(%d+):(%d+)$')
  return tonumber(bytes), tonumber(groups)
end
local function value(key, group)
  return root .. key .. ':' .. group
end
local function is_scores(key)
  return string.find(key, '.', 1, true) ~= nil
end
local function forget(key)
  local bytes, groups = held(key)
  if bytes then
    redis.call('HDEL', sizes, key)
    if bytes > 0 then redis.call('HINCRBY', sizes, '', -bytes) end  -- it takes no "-0"
    if is_scores(key) then redis.call('HINCRBY', sizes, '.', -1) end
  end
  redis.call('ZREM', uses, key)
  return groups
end
local function drop_one(key, known)
  local groups = math.max(forget(key) or 0, known)
  local there = 0
  local group = 0
  while true do
    local gone = redis.call('UNLINK', value(key, group))
    if group == 0 then there = gone end
    group = group + 1
    if group >= groups and gone == 0 then return there end
  end
end
local function drop(key, known)  -- with the scores next to it
  if not is_scores(key) then
    drop_one(key .. '.a', 0)
    drop_one(key .. '.b', 0)
  end
  return drop_one(key, known)
end
local function settled(key)  -- not being written: a writer enters the key, and writes its values within a minute
  local used = redis.call('ZSCORE', uses, key)
  return not used or now() - tonumber(used) > 60 * 1000000
end
local function enter(key, bytes, groups)
  forget(key)
  redis.call('HSET', sizes, key, string.format('%d:%d', bytes, groups))
  redis.call('HINCRBY', sizes, '', bytes)
  if is_scores(key) then redis.call('HINCRBY', sizes, '.', 1) end
  redis.call('ZADD', uses, now(), key)
end
"""

# key, bytes of the head, milliseconds to live or 0 -> the head's beginning, or false
FIND = """
local key, head_bytes, ttl = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local head = redis.call('GETRANGE', value(key, 0), 0, head_bytes - 1)
local _, groups = held(key)
if head == '' then
  if groups and settled(key) then drop(key, 0) end
  return false
end
for group = 1, (groups or 1) - 1 do
  if redis.call('EXISTS', value(key, group)) == 0 then
    drop(key, groups)
    return false
  end
end
redis.pcall('ZADD', uses, 'XX', now(), key)  -- refused where memory is full; reading goes on
if ttl > 0 then
  for group = 0, (groups or 1) - 1 do redis.call('PEXPIRE', value(key, group), ttl) end
end
return head
"""

# key, bytes, groups, capacity, pinned keys ... -> {0: refused, 1: there already, 2: entered, write it; evicted}
RESERVE = """
local key, bytes, groups, capacity = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
if redis.call('EXISTS', value(key, 0)) == 1 then
  local whole = true
  for group = 1, groups - 1 do whole = whole and redis.call('EXISTS', value(key, group)) == 1 end
  if whole then
    if not held(key) then enter(key, bytes, groups) end
    return {1, 0}
  end
  redis.call('UNLINK', value(key, 0))  -- or a lookup would find it, and drop it, while its groups are written
end
local mine = held(key) or 0
local pinned = {}
for i = 6, #ARGV do pinned[ARGV[i]] = true end
local over = tonumber(redis.call('HGET', sizes, '') or '0') - mine + bytes - capacity
local victims, entries, from = {}, 0, 0
while over > 0 do
  local batch = redis.call('ZRANGE', uses, from, from + 99)
  if #batch == 0 then return {0, 0} end
  for _, other in ipairs(batch) do
    if over > 0 and other ~= key and not pinned[other] then
      victims[#victims + 1] = other
      if not is_scores(other) then entries = entries + 1 end
      over = over - (held(other) or 0)
    end
  end
  from = from + 100
end
for _, other in ipairs(victims) do drop(other, 0) end
enter(key, bytes, groups)
return {2, entries}
"""

# key, bytes, groups: enter what was written, if the accounting was lost meanwhile
ENTER = """
if not held(ARGV[2]) then enter(ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])) end
return 1
"""

# key, most groups: enter what is there, if the accounting lacks it; nothing if the entry was deleted meanwhile
RECOUNT = """
local key, bytes, groups = ARGV[2], 0, 0
if held(key) then return 0 end
while groups < tonumber(ARGV[3]) do
  local length = redis.call('STRLEN', value(key, groups))
  if length == 0 then break end
  bytes, groups = bytes + length, groups + 1
end
if groups > 0 then enter(key, bytes, groups) end
return groups
"""

# key, groups known, content digest or '', its offset in a head -> 1 if the head was there
DROP = """
local key, digest, at = ARGV[2], ARGV[4], tonumber(ARGV[5])
if digest ~= '' then
  local found = redis.call('GETRANGE', value(key, 0), at, at + #digest - 1)
  if found ~= digest then return 0 end  -- gone, or another replica writes it anew
end
return drop(key, tonumber(ARGV[3]))
"""

# key: drop it if its head is gone
AUDIT = """
local _, groups = held(ARGV[2])
if groups and settled(ARGV[2]) and redis.call('EXISTS', value(ARGV[2], 0)) == 0 then drop(ARGV[2], groups) end
return 1
"""
