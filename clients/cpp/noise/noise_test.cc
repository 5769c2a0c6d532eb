// Checks the noise against protos/coupled_noise.json.
#include "noise.h"

#include <fstream>
#include <iostream>
#include <nlohmann/json.hpp>

using nlohmann::json;

uint64_t Number(const json& text) { return std::stoull(text.get<std::string>(), nullptr, 0); }

void Check(bool fact, const json& row) {
  if (fact) return;
  std::cerr << row << "\n";
  std::exit(1);
}

int main(int, char** argv) {
  json vectors = json::parse(std::ifstream(argv[1]));
  for (const auto& row : vectors["noise"]) {
    uint64_t key = outrider::NoiseKey(Number(row["seed"]), Number(row["position"]));
    Check(key == Number(row["key"]), row);
  }
  for (const auto* list : {&vectors["noise"], &vectors["edges"]}) {
    for (const auto& row : *list) {
      uint64_t z = outrider::NoiseOutput(Number(row["key"]), row["token"]);
      double expected = row["exponential"];
      // Allow two units in the last place.
      double error = std::abs(outrider::Exponential(z) - expected);
      Check(z == Number(row["z"]) && error <= expected * 0x1p-51, row);
    }
  }
  for (const auto& row : vectors["draws"]) {
    auto probs = row["probs"].get<std::vector<float>>();
    auto token = outrider::CoupledDraw(probs, Number(row["seed"]), Number(row["position"]));
    Check(token == row["token"], row);
  }
  std::cout << "ok noise" << std::endl;
}
