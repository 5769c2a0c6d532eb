// Calls Outrider's gRPC services from C++. Usage: client GATEWAY VERIFIER UNAVAILABLE [CERTS]
// (host:port each). UNAVAILABLE is a gateway that has no verifier. With CERTS, a folder that
// `outrider certs` made, the client uses mutual TLS as an operator.
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <fstream>
#include <functional>
#include <iostream>
#include <iterator>
#include <limits>
#include <vector>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "grpc/health/v1/health.grpc.pb.h"
#include "grpc/reflection/v1/reflection.grpc.pb.h"
#include "outrider/v1/generation.grpc.pb.h"
#include "outrider/v1/verifier.grpc.pb.h"

using namespace outrider::v1;
using grpc::ClientContext;
using grpc::StatusCode;

std::string certs;  // empty without TLS

std::string File(const std::string& name) {
  std::ifstream file(certs + "/" + name);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::shared_ptr<grpc::Channel> Dial(const std::string& address, const std::string& name = {}) {
  if (certs.empty()) return grpc::CreateChannel(address, grpc::InsecureChannelCredentials());
  grpc::ChannelArguments arguments;
  if (!name.empty()) arguments.SetSslTargetNameOverride(name);
  auto credentials = grpc::SslCredentials({File("ca.pem"), File("operator.key"), File("operator.pem")});
  return grpc::CreateCustomChannel(address, credentials, arguments);
}

GenerateTextRequest Request(const std::function<void(GenerateTextRequest&)>& change = {}) {
  GenerateTextRequest request;
  request.set_prompt("def main(");
  request.set_max_tokens(16);
  request.mutable_sampling()->set_temperature(0);
  if (change) change(request);
  return request;
}

void Check(const std::string& name, std::initializer_list<bool> facts) {
  for (bool fact : facts) {
    if (!fact) {
      std::cerr << name << " failed\n";
      std::exit(1);
    }
  }
  std::cout << "ok " << name << std::endl;
}

// The end of a call: its status, and the details that every Outrider error has.
struct Ending {
  grpc::Status status;
  google::rpc::ErrorInfo info;
  google::rpc::BadRequest bad;
  google::rpc::RetryInfo retry;

  explicit Ending(const grpc::Status& ended) : status(ended) {
    google::rpc::Status details;
    details.ParseFromString(ended.error_details());
    for (const auto& packed : details.details()) {
      packed.UnpackTo(&info) || packed.UnpackTo(&bad) || packed.UnpackTo(&retry);
    }
  }
};

using Text = std::unique_ptr<GenerationService::Stub>;

// Reads a whole text into `parts`, and calls `each` after each message.
Ending Read(const Text& text, ClientContext& context, const GenerateTextRequest& request,
            std::vector<GenerateTextResponse>* parts = nullptr,
            const std::function<void()>& each = {}) {
  auto stream = text->GenerateText(&context, request);
  for (GenerateTextResponse part; stream->Read(&part);) {
    if (parts) parts->push_back(part);
    if (each) each();
  }
  return Ending(stream->Finish());
}

int main(int argc, char** argv) {
  if (argc > 4) certs = argv[4];
  auto gateway = Dial(argv[1]);
  auto text = GenerationService::NewStub(gateway);

  // Stream a text. The last message has the token counts and the finish reason.
  ClientContext streamed;
  std::vector<GenerateTextResponse> parts;
  auto ended = Read(text, streamed, Request(), &parts);
  std::string whole;
  for (const auto& part : parts) whole += part.text();
  auto count = parts.back().usage().completion_token_count();
  Check("stream", {ended.status.ok(), !whole.empty(), count == 16});

  // Cancel a call. The server frees everything that the call held.
  ClientContext cancelled;
  auto endless = Request([](auto& r) { r.set_max_tokens(1000); });
  ended = Read(text, cancelled, endless, nullptr, [&] { cancelled.TryCancel(); });
  Check("cancel", {ended.status.error_code() == StatusCode::CANCELLED});

  // Set a deadline. The server stops at it as well.
  ClientContext late;
  late.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(50));
  ended = Read(text, late, Request([](auto& r) { r.set_max_tokens(1900); }));
  Check("deadline", {ended.status.error_code() == StatusCode::DEADLINE_EXCEEDED});

  // Send bad input. The error has the reason and the field at fault.
  ClientContext hot;
  ended = Read(text, hot, Request([](auto& r) { r.mutable_sampling()->set_temperature(9); }));
  Check("bad-value", {ended.status.error_code() == StatusCode::INVALID_ARGUMENT,
                      ended.info.domain() == "outrider.dev",
                      ended.info.reason() == "INVALID_VALUE",
                      ended.bad.field_violations(0).field() == "sampling.temperature"});
  ClientContext unknown;
  ended = Read(text, unknown, Request([](auto& r) { r.set_model("no-such-model"); }));
  Check("unknown-model", {ended.status.error_code() == StatusCode::NOT_FOUND,
                          ended.info.reason() == "MODEL_NOT_FOUND"});

  // Call a gateway without a verifier. RetryInfo says when to try again.
  ClientContext gone;
  ended = Read(GenerationService::NewStub(Dial(argv[3])), gone, Request());
  const auto& delay = ended.retry.retry_delay();
  Check("unavailable", {ended.status.error_code() == StatusCode::UNAVAILABLE,
                        delay.seconds() + delay.nanos() > 0});

  // Use gRPC's health and reflection services.
  ClientContext checked;
  grpc::health::v1::HealthCheckRequest asked;
  asked.set_service("outrider.v1.GenerationService");
  grpc::health::v1::HealthCheckResponse health;
  bool answered = grpc::health::v1::Health::NewStub(gateway)->Check(&checked, asked, &health).ok();
  Check("health", {answered, health.status() == grpc::health::v1::HealthCheckResponse::SERVING});
  ClientContext reflected;
  grpc::reflection::v1::ServerReflectionRequest list;
  list.set_list_services("");
  grpc::reflection::v1::ServerReflectionResponse listed;
  auto reflector = grpc::reflection::v1::ServerReflection::NewStub(gateway);
  auto reflection = reflector->ServerReflectionInfo(&reflected);
  reflection->Write(list);
  reflection->WritesDone();
  bool served = false;
  if (reflection->Read(&listed)) {
    for (const auto& service : listed.list_services_response().service()) {
      served |= service.name() == "outrider.v1.GenerationService";
    }
  }
  Check("reflection", {served});

  // Generate token ids at the verifier. A seed has 64 bits. A verifier's certificate has the name
  // verifier.outrider, not that of its host.
  auto tokens = VerifierService::NewStub(Dial(argv[2], "verifier.outrider"));
  GenerateTokensRequest ids;
  for (int id : {1, 2, 3}) ids.add_prompt_token_ids(id);
  ids.set_max_tokens(8);
  ids.set_ignore_eos(true);
  ids.mutable_sampling()->set_seed(std::numeric_limits<uint64_t>::max());
  std::vector<uint32_t> drawn[2];
  for (auto& one : drawn) {
    ClientContext context;
    auto stream = tokens->GenerateTokens(&context, ids);
    for (GenerateTokensResponse part; stream->Read(&part);) {
      one.insert(one.end(), part.token_ids().begin(), part.token_ids().end());
    }
  }
  Check("tokens", {drawn[0].size() == 8, drawn[0] == drawn[1]});
}
