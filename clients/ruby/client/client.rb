# Calls Outrider's gRPC services from Ruby.
# Usage: client.rb GATEWAY VERIFIER UNAVAILABLE [CERTS] (host:port each)
# UNAVAILABLE is a gateway that has no verifier. With CERTS, a folder that `outrider certs` made,
# the client uses mutual TLS as an operator.
$LOAD_PATH.unshift(File.join(__dir__, "build"))
require "google/protobuf/well_known_types" # without it, Any has no `unpack`
require "google/rpc/error_details_pb"
require "google/rpc/status_pb"
require "grpc/health/v1/health_services_pb"
require "grpc/reflection/v1/reflection_services_pb"
require "outrider/v1/generation_services_pb"
require "outrider/v1/verifier_services_pb"

include Outrider::V1

GATEWAY, VERIFIER, UNAVAILABLE, CERTS = ARGV
FILES = %w[ca.pem operator.key operator.pem].map { |file| CERTS && File.read(File.join(CERTS, file)) }
SECURITY = CERTS ? GRPC::Core::ChannelCredentials.new(*FILES) : :this_channel_is_insecure

def stub(address) = GenerationService::Stub.new(address, SECURITY)

def request(sampling: { temperature: 0 }, **fields)
  GenerateTextRequest.new(
    prompt: "def main(", max_tokens: 16, **fields, sampling: SamplingParams.new(**sampling)
  )
end

def check(name, *facts)
  abort("#{name} failed: #{facts}") unless facts.all?
  puts "ok #{name}"
end

# A call's status code, and the details that every Outrider error has, by type.
def failure
  yield
  abort("the call did not fail")
rescue GRPC::BadStatus => e
  status = e.to_rpc_status
  types = [Google::Rpc::ErrorInfo, Google::Rpc::BadRequest, Google::Rpc::RetryInfo]
  details = status.nil? ? [] : status.details.to_a
  pairs = details.map do |any|
    type = types.find { |known| any.is(known) }
    [type, any.unpack(type)]
  end
  [e.code, pairs.to_h]
end

text = stub(GATEWAY)

# Stream a text. The last message has the token counts and the finish reason.
parts = text.generate_text(request).to_a
check("stream", !parts.map(&:text).join.empty?, parts.last.usage.completion_token_count == 16)

# Cancel a call. The server frees everything that the call held.
call = text.generate_text(request(max_tokens: 1000), return_op: true)
begin
  call.execute.each { call.cancel }
rescue GRPC::Cancelled
  check("cancel", call.cancelled?)
end

# Set a deadline. The server stops at it as well. If the deadline passes before the first response,
# this gem raises CallError instead, so a slow machine gets more time.
seconds = 0.05
begin
  code, = failure { text.generate_text(request(max_tokens: 1900), deadline: Time.now + seconds).to_a }
rescue GRPC::Core::CallError
  seconds *= 4
  seconds < 5 ? retry : raise
end
check("deadline", code == GRPC::Core::StatusCodes::DEADLINE_EXCEEDED)

# Send bad input. The error has the reason and the field at fault.
code, details = failure { text.generate_text(request(sampling: { temperature: 9 })).to_a }
info, bad = details.values_at(Google::Rpc::ErrorInfo, Google::Rpc::BadRequest)
check("bad-value", code == GRPC::Core::StatusCodes::INVALID_ARGUMENT,
      [info.domain, info.reason] == ["outrider.dev", "INVALID_VALUE"],
      bad.field_violations.first.field == "sampling.temperature")
code, details = failure { text.generate_text(request(model: "no-such-model")).to_a }
check("unknown-model", code == GRPC::Core::StatusCodes::NOT_FOUND,
      details[Google::Rpc::ErrorInfo].reason == "MODEL_NOT_FOUND")

# Call a gateway without a verifier. RetryInfo says when to try again.
code, details = failure { stub(UNAVAILABLE).generate_text(request).to_a }
delay = details[Google::Rpc::RetryInfo].retry_delay
check("unavailable", code == GRPC::Core::StatusCodes::UNAVAILABLE, delay.to_f.positive?)

# Use gRPC's health and reflection services.
health = Grpc::Health::V1::Health::Stub.new(GATEWAY, SECURITY)
asked = Grpc::Health::V1::HealthCheckRequest.new(service: "outrider.v1.GenerationService")
check("health", health.check(asked).status == :SERVING)
reflection = Grpc::Reflection::V1::ServerReflection::Stub.new(GATEWAY, SECURITY)
asked = Grpc::Reflection::V1::ServerReflectionRequest.new(list_services: "")
listed = reflection.server_reflection_info([asked]).first.list_services_response.service
check("reflection", listed.map(&:name).include?("outrider.v1.GenerationService"))

# Generate token ids at the verifier. A seed has 64 bits. A verifier's certificate has the name
# verifier.outrider, not that of its host.
name = CERTS ? { GRPC::Core::Channel::SSL_TARGET => "verifier.outrider" } : {}
tokens = VerifierService::Stub.new(VERIFIER, SECURITY, channel_args: name)
ids = GenerateTokensRequest.new(
  prompt_token_ids: [1, 2, 3], max_tokens: 8, ignore_eos: true, sampling: SamplingParams.new(seed: 2**64 - 1)
)
drawn = Array.new(2) { tokens.generate_tokens(ids).flat_map { |part| part.token_ids.to_a } }
check("tokens", drawn[0].length == 8, drawn[0] == drawn[1])
