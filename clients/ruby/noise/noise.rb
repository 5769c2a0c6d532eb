# The coupled noise of docs/coupling.md, and a check against protos/coupled_noise.json.
require "json"

MASK32 = 2**32 - 1
MASK64 = 2**64 - 1

# Philox4x32-10 of (position, 3, 0) under the seed: the key of a position's noise.
def noise_key(seed, position)
  c = [position & MASK32, position >> 32, 3, 0]
  k = [seed & MASK32, seed >> 32]
  10.times do
    a = 0xD2511F53 * c[0]
    b = 0xCD9E8D57 * c[2]
    c = [(b >> 32) ^ c[1] ^ k[0], b & MASK32, (a >> 32) ^ c[3] ^ k[1], a & MASK32]
    k = [(k[0] + 0x9E3779B9) & MASK32, (k[1] + 0xBB67AE85) & MASK32]
  end
  c[0] | c[1] << 32
end

# Output number `token` of SplitMix64 with the state `key`, counted from 0.
def output(key, token)
  z = (key + (token + 1) * 0x9E3779B97F4A7C15) & MASK64
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
  z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
  z ^ z >> 31
end

def exponential(z) = -Math.log(((z >> 12) + 0.5) * 2.0**-52)

# The token that the verifier draws from these probabilities. The lowest id wins a tie.
def draw(probs, seed, position)
  key = noise_key(seed, position)
  scores = probs.each_with_index.map { |p, token| p / exponential(output(key, token)) }
  scores.index(scores.max)
end

if $PROGRAM_NAME == __FILE__
  vectors = JSON.parse(File.read(File.join(__dir__, "../../../protos/coupled_noise.json")))
  vectors["noise"].each do |row|
    key = noise_key(Integer(row["seed"]), Integer(row["position"]))
    raise row.to_s unless key == Integer(row["key"])
  end
  (vectors["noise"] + vectors["edges"]).each do |row|
    z = output(Integer(row["key"]), row["token"])
    expected = row["exponential"]
    # Allow two units in the last place.
    error = (exponential(z) - expected).abs
    raise row.to_s unless z == Integer(row["z"]) && error <= expected * 2.0**-51
  end
  vectors["draws"].each do |row|
    token = draw(row["probs"], Integer(row["seed"]), Integer(row["position"]))
    raise row.to_s unless token == row["token"]
  end
  puts "ok noise"
end
