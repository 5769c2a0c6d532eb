// Calls Outrider's gRPC services from Java. Usage: Client GATEWAY VERIFIER UNAVAILABLE
// (host:port each). UNAVAILABLE is a gateway that has no verifier.
import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.google.rpc.RetryInfo;
import dev.outrider.v1.GenerateTextRequest;
import dev.outrider.v1.GenerateTextResponse;
import dev.outrider.v1.GenerateTokensRequest;
import dev.outrider.v1.GenerationServiceGrpc;
import dev.outrider.v1.SamplingParams;
import dev.outrider.v1.VerifierServiceGrpc;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import io.grpc.health.v1.HealthCheckRequest;
import io.grpc.health.v1.HealthCheckResponse.ServingStatus;
import io.grpc.health.v1.HealthGrpc;
import io.grpc.netty.NettyChannelBuilder;
import io.grpc.reflection.v1.ServerReflectionGrpc;
import io.grpc.reflection.v1.ServerReflectionRequest;
import io.grpc.reflection.v1.ServerReflectionResponse;
import io.grpc.stub.StreamObserver;
import java.util.ArrayList;
import java.util.Iterator;
import java.util.List;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

public final class Client {
  static ManagedChannel dial(String address) {
    return NettyChannelBuilder.forTarget(address).usePlaintext().build();
  }

  static GenerateTextRequest.Builder request() {
    return GenerateTextRequest.newBuilder().setPrompt("def main(").setMaxTokens(16)
        .setSampling(SamplingParams.newBuilder().setTemperature(0));
  }

  static void check(String name, boolean... facts) {
    for (boolean fact : facts) {
      if (!fact) throw new IllegalStateException(name + " failed");
    }
    System.out.println("ok " + name);
  }

  /** The failure of a call: its status, and the details that every Outrider error has. */
  static final class Failure {
    Status.Code code;
    ErrorInfo info = ErrorInfo.getDefaultInstance();
    BadRequest bad = BadRequest.getDefaultInstance();
    RetryInfo retry = RetryInfo.getDefaultInstance();

    Failure(Iterator<?> responses) throws InvalidProtocolBufferException {
      Metadata.Key<byte[]> key =
          Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);
      try {
        responses.forEachRemaining(response -> {});
        throw new IllegalStateException("the call did not fail");
      } catch (StatusRuntimeException error) {
        code = error.getStatus().getCode();
        byte[] details = error.getTrailers() == null ? null : error.getTrailers().get(key);
        if (details == null) return;
        for (Any packed : com.google.rpc.Status.parseFrom(details).getDetailsList()) {
          if (packed.is(ErrorInfo.class)) info = packed.unpack(ErrorInfo.class);
          if (packed.is(BadRequest.class)) bad = packed.unpack(BadRequest.class);
          if (packed.is(RetryInfo.class)) retry = packed.unpack(RetryInfo.class);
        }
      }
    }
  }

  public static void main(String[] addresses) throws Exception {
    ManagedChannel gateway = dial(addresses[0]);
    var text = GenerationServiceGrpc.newBlockingStub(gateway);

    // Stream a text. The last message has the token counts and the finish reason.
    var whole = new StringBuilder();
    GenerateTextResponse last = null;
    for (var parts = text.generateText(request().build()); parts.hasNext(); ) {
      last = parts.next();
      whole.append(last.getText());
    }
    check("stream", whole.length() > 0, last.getUsage().getCompletionTokenCount() == 16);

    // Cancel a call. The server frees everything that the call held.
    var context = Context.current().withCancellation();
    var endless = context.call(() -> text.generateText(request().setMaxTokens(1000).build()));
    endless.next();
    context.cancel(null);
    check("cancel", new Failure(endless).code == Status.Code.CANCELLED);

    // Set a deadline. The server stops at it as well.
    var late = text.withDeadlineAfter(50, TimeUnit.MILLISECONDS)
        .generateText(request().setMaxTokens(1900).build());
    check("deadline", new Failure(late).code == Status.Code.DEADLINE_EXCEEDED);

    // Send bad input. The error has the reason and the field at fault.
    var hot = request().setSampling(SamplingParams.newBuilder().setTemperature(9));
    var failure = new Failure(text.generateText(hot.build()));
    check("bad-value", failure.code == Status.Code.INVALID_ARGUMENT,
        failure.info.getDomain().equals("outrider.dev"),
        failure.info.getReason().equals("INVALID_VALUE"),
        failure.bad.getFieldViolations(0).getField().equals("sampling.temperature"));
    failure = new Failure(text.generateText(request().setModel("no-such-model").build()));
    check("unknown-model", failure.code == Status.Code.NOT_FOUND,
        failure.info.getReason().equals("MODEL_NOT_FOUND"));

    // Call a gateway without a verifier. RetryInfo says when to try again.
    var lonely = GenerationServiceGrpc.newBlockingStub(dial(addresses[2]));
    failure = new Failure(lonely.generateText(request().build()));
    var delay = failure.retry.getRetryDelay();
    check("unavailable", failure.code == Status.Code.UNAVAILABLE,
        delay.getSeconds() + delay.getNanos() > 0);

    // Use gRPC's health and reflection services.
    var asked = HealthCheckRequest.newBuilder().setService("outrider.v1.GenerationService").build();
    check("health", HealthGrpc.newBlockingStub(gateway).check(asked).getStatus() == ServingStatus.SERVING);
    check("reflection", services(gateway).contains("outrider.v1.GenerationService"));

    // Generate token ids at the verifier. A seed has 64 bits; from 2^63 on it is a negative long.
    var tokens = VerifierServiceGrpc.newBlockingStub(dial(addresses[1]));
    var ids = GenerateTokensRequest.newBuilder().addAllPromptTokenIds(List.of(1, 2, 3)).setMaxTokens(8).setIgnoreEos(true)
        .setSampling(SamplingParams.newBuilder().setSeed(Long.parseUnsignedLong("18446744073709551615"))).build();
    List<List<Integer>> drawn = List.of(new ArrayList<>(), new ArrayList<>());
    for (var one : drawn) {
      tokens.generateTokens(ids).forEachRemaining(part -> one.addAll(part.getTokenIdsList()));
    }
    check("tokens", drawn.get(0).size() == 8, drawn.get(0).equals(drawn.get(1)));
    System.exit(0); // Do not wait for the channels' threads.
  }

  static List<String> services(ManagedChannel channel) throws Exception {
    var found = new CompletableFuture<List<String>>();
    var responses = new StreamObserver<ServerReflectionResponse>() {
      @Override public void onNext(ServerReflectionResponse response) {
        List<String> names = new ArrayList<>();
        for (var service : response.getListServicesResponse().getServiceList()) {
          names.add(service.getName());
        }
        found.complete(names);
      }

      @Override public void onError(Throwable error) {
        found.completeExceptionally(error);
      }

      @Override public void onCompleted() {}
    };
    var requests = ServerReflectionGrpc.newStub(channel).serverReflectionInfo(responses);
    requests.onNext(ServerReflectionRequest.newBuilder().setListServices("").build());
    requests.onCompleted();
    return found.get(10, TimeUnit.SECONDS);
  }
}
