# A drafter: it guesses what followed the newest earlier occurrence of the text's last two tokens.
$LOAD_PATH.unshift(File.join(__dir__, "generated"))
require "google/protobuf/well_known_types"
require "google/rpc/error_details_pb"
require "google/rpc/status_pb"
require "outrider/v1/verifier_services_pb"

include Outrider::V1

def guess(text, count)
  (text.length - 3).downto(0) do |start|
    return text[start + 2, count] if text[start, 2] == text[-2, 2]
  end
  []
end

# The message for one sequence: a guess after its committed tokens, and a skip if that is too short.
def answer(id, text, count)
  found = count.positive? ? guess(text, count) : []
  place = { sequence_id: id, base_length: text.length }
  batch = DraftBatch.new
  batch.proposals << Proposal.new(**place, token_ids: found) unless found.empty?
  batch.skips << Skip.new(**place) if found.length < count
  batch
end

# Takes in what a step says, and answers it.
def follow(step, texts, outbox)
  step.opened.each { |opened| texts[opened.sequence_id] = opened.token_ids.to_a }
  step.verdicts.each do |verdict|
    text = texts[verdict.sequence_id]
    # The verdict's tokens end at committed_length; some of them may be known.
    text.concat(verdict.new_token_ids.to_a.last([verdict.committed_length - text.length, 0].max))
  end
  step.closed.each { |closed| texts.delete(closed.sequence_id) }
  (step.opened.to_a + step.verdicts.to_a).each do |asked|
    text = texts[asked.sequence_id] or next
    outbox << StreamDraftsRequest.new(drafts: answer(asked.sequence_id, text, asked.draft_tokens))
  end
end

def ready_model(verifier)
  loop do
    model = verifier.get_model(GetModelRequest.new, deadline: Time.now + 10)
    return model if model.stage == :MODEL_STAGE_READY
    sleep 0.25
  end
end

# One stream, from Hello to its end. Requests come from a queue at any time; nil half-closes.
def draft(verifier, fingerprint, outbox)
  outbox << StreamDraftsRequest.new(hello: Hello.new(
    drafter_id: "ruby-#{Process.pid}", family: "ruby", max_draft_tokens: 8, tokenizer_fingerprint: fingerprint
  ))
  texts = {}
  requests = Enumerator.new { |out| while (message = outbox.pop) do out << message end }
  verifier.stream_drafts(requests).each do |message|
    puts("drafting for #{message.welcome.model_id}") if message.welcome
    follow(message.step, texts, outbox) if message.step
  end
end

# Returns the seconds to wait after an error, as errors.proto says. Exits if its `retry` is never.
def pause(error, backoff)
  details = error.to_rpc_status&.details.to_a
  unpacked = ->(type) { details.find { |any| any.is(type) }&.unpack(type) }
  info = unpacked.call(Google::Rpc::ErrorInfo)
  abort(error.details) if info && info.metadata["retry"] == "never"
  unpacked.call(Google::Rpc::RetryInfo)&.retry_delay&.to_f || backoff
end

outbox = stopping = nil
Signal.trap("TERM") do
  stopping = true
  Thread.new { outbox << StreamDraftsRequest.new(draining: Draining.new(reason: "stopping")) << nil }
end
options = { "grpc.max_reconnect_backoff_ms" => 2000, "grpc.max_receive_message_length" => 2**24 }
verifier = VerifierService::Stub.new(ARGV.fetch(0), :this_channel_is_insecure, channel_args: options)
backoff = 0.1
until stopping
  begin
    model = ready_model(verifier)
    draft(verifier, model.tokenizer_fingerprint, outbox = Queue.new)
  rescue GRPC::BadStatus => e
    sleep(pause(e, backoff))
    backoff = [2 * backoff, 2].min
  end
end
