//! The coupled noise of docs/coupling.md, and a check against protos/coupled_noise.json.
use serde_json::Value;

/// Philox4x32-10 of (position, 3, 0) under the seed: the key of a position's noise.
fn key(seed: u64, position: u64) -> u64 {
    let mut c = [position as u32, (position >> 32) as u32, 3, 0];
    let (mut k0, mut k1) = (seed as u32, (seed >> 32) as u32);
    for _ in 0..10 {
        let (a, b) = (0xD2511F53 * c[0] as u64, 0xCD9E8D57 * c[2] as u64);
        c = [(b >> 32) as u32 ^ c[1] ^ k0, b as u32, (a >> 32) as u32 ^ c[3] ^ k1, a as u32];
        k0 = k0.wrapping_add(0x9E3779B9);
        k1 = k1.wrapping_add(0xBB67AE85);
    }
    c[0] as u64 | (c[1] as u64) << 32
}

/// Output number `token` of SplitMix64 with the state `key`, counted from 0.
fn output(key: u64, token: u64) -> u64 {
    let mut z = key.wrapping_add((token + 1).wrapping_mul(0x9E3779B97F4A7C15));
    z = (z ^ z >> 30).wrapping_mul(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D049BB133111EB);
    z ^ z >> 31
}

fn exponential(z: u64) -> f64 {
    -(((z >> 12) as f64 + 0.5) * f64::EPSILON).ln() // 2^-52
}

/// The token that the verifier draws from these probabilities. The lowest id wins a tie.
fn draw(probs: &[f32], seed: u64, position: u64) -> u64 {
    let key = key(seed, position);
    let (mut best, mut token) = (-1.0, 0);
    for (id, &p) in probs.iter().enumerate() {
        let score = p as f64 / exponential(output(key, id as u64));
        if score > best {
            (best, token) = (score, id as u64);
        }
    }
    token
}

fn number(value: &Value) -> u64 {
    let text = value.as_str().unwrap();
    match text.strip_prefix("0x") {
        Some(digits) => u64::from_str_radix(digits, 16).unwrap(),
        None => text.parse().unwrap(),
    }
}

fn main() {
    let text = std::fs::read_to_string(std::env::args().nth(1).unwrap()).unwrap();
    let vectors: Value = serde_json::from_str(&text).unwrap();
    let rows = |name: &str| vectors[name].as_array().unwrap().clone();
    for row in rows("noise") {
        let found = key(number(&row["seed"]), number(&row["position"]));
        assert_eq!(found, number(&row["key"]), "{row}");
    }
    for row in rows("noise").into_iter().chain(rows("edges")) {
        let z = output(number(&row["key"]), row["token"].as_u64().unwrap());
        assert_eq!(z, number(&row["z"]), "{row}");
        let expected = row["exponential"].as_f64().unwrap();
        // Allow two units in the last place.
        assert!((exponential(z) - expected).abs() <= expected * 2.0 * f64::EPSILON, "{row}");
    }
    for row in rows("draws") {
        let given = row["probs"].as_array().unwrap().iter();
        let probs: Vec<f32> = given.map(|p| p.as_f64().unwrap() as f32).collect();
        let drawn = draw(&probs, number(&row["seed"]), number(&row["position"]));
        assert_eq!(drawn, row["token"].as_u64().unwrap(), "{row}");
    }
    println!("ok noise");
}
