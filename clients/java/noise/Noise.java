// The coupled noise of docs/coupling.md, and a check against protos/coupled_noise.json.
import com.google.gson.JsonArray;
import com.google.gson.JsonElement;
import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import java.nio.file.Files;
import java.nio.file.Path;

public final class Noise {
  /**
   * Philox4x32-10 of (position, 3, 0) under the seed: the key of a position's noise. Longs are
   * unsigned.
   */
  static long key(long seed, long position) {
    int c0 = (int) position, c1 = (int) (position >>> 32), c2 = 3, c3 = 0;
    int k0 = (int) seed, k1 = (int) (seed >>> 32);
    for (int round = 0; round < 10; round++) {
      long a = 0xD2511F53L * (c0 & 0xFFFFFFFFL), b = 0xCD9E8D57L * (c2 & 0xFFFFFFFFL);
      c0 = (int) (b >>> 32) ^ c1 ^ k0;
      c2 = (int) (a >>> 32) ^ c3 ^ k1;
      c1 = (int) b;
      c3 = (int) a;
      k0 += 0x9E3779B9;
      k1 += 0xBB67AE85;
    }
    return (c0 & 0xFFFFFFFFL) | (long) c1 << 32;
  }

  /** Output number `token` of SplitMix64 with the state `key`, counted from 0. */
  static long output(long key, long token) {
    long z = key + (token + 1) * 0x9E3779B97F4A7C15L;
    z = (z ^ z >>> 30) * 0xBF58476D1CE4E5B9L;
    z = (z ^ z >>> 27) * 0x94D049BB133111EBL;
    return z ^ z >>> 31;
  }

  static double exponential(long z) {
    return -Math.log(((z >>> 12) + 0.5) * 0x1p-52);
  }

  /** The token that the verifier draws from these probabilities. The lowest id wins a tie. */
  static int draw(float[] probs, long seed, long position) {
    long key = key(seed, position);
    int token = 0;
    double best = -1;
    for (int id = 0; id < probs.length; id++) {
      double score = probs[id] / exponential(output(key, id));
      if (score > best) {
        best = score;
        token = id;
      }
    }
    return token;
  }

  static long number(JsonElement row, String name) {
    String text = row.getAsJsonObject().get(name).getAsString();
    if (text.startsWith("0x")) return Long.parseUnsignedLong(text.substring(2), 16);
    return Long.parseUnsignedLong(text);
  }

  static void check(boolean fact, JsonElement row) {
    if (!fact) throw new IllegalStateException(row.toString());
  }

  public static void main(String[] arguments) throws Exception {
    String file = Files.readString(Path.of(arguments[0]));
    JsonObject vectors = JsonParser.parseString(file).getAsJsonObject();
    JsonArray noise = vectors.getAsJsonArray("noise");
    for (var row : noise) {
      check(key(number(row, "seed"), number(row, "position")) == number(row, "key"), row);
    }
    noise.addAll(vectors.getAsJsonArray("edges"));
    for (var row : noise) {
      long z = output(number(row, "key"), number(row, "token"));
      double expected = row.getAsJsonObject().get("exponential").getAsDouble();
      // Allow two units in the last place.
      double error = Math.abs(exponential(z) - expected);
      check(z == number(row, "z") && error <= expected * 0x1p-51, row);
    }
    for (var row : vectors.getAsJsonArray("draws")) {
      JsonArray given = row.getAsJsonObject().getAsJsonArray("probs");
      float[] probs = new float[given.size()];
      for (int i = 0; i < probs.length; i++) probs[i] = given.get(i).getAsFloat();
      long token = draw(probs, number(row, "seed"), number(row, "position"));
      check(token == number(row, "token"), row);
    }
    System.out.println("ok noise");
  }
}
