// Command client calls Outrider's gRPC services. Usage: client GATEWAY VERIFIER UNAVAILABLE [CERTS]
// (host:port each). UNAVAILABLE is a gateway that has no verifier. With CERTS, a folder that
// `outrider certs` made, the client uses mutual TLS as an operator.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/reflection/grpc_reflection_v1alpha"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"outrider.dev/go/internal/dial"
	pb "outrider.dev/go/outrider/v1"
)

// channel returns a channel. With TLS the server's certificate must have the given name. If the
// name is empty, the certificate must have the host's name. In your own code, call grpc.NewClient
// in place of dial.New: gRPC has it from 1.63 on.
func channel(address, name string) *grpc.ClientConn {
	var security *tls.Config
	if len(os.Args) > 4 {
		security = operator(os.Args[4], name)
	}
	connection, err := dial.New(address, security)
	must(err)
	return connection
}

func operator(certs, name string) *tls.Config {
	own, err := tls.LoadX509KeyPair(filepath.Join(certs, "operator.pem"), filepath.Join(certs, "operator.key"))
	must(err)
	authorities, err := os.ReadFile(filepath.Join(certs, "ca.pem"))
	must(err)
	trusted := x509.NewCertPool()
	trusted.AppendCertsFromPEM(authorities)
	return &tls.Config{Certificates: []tls.Certificate{own}, RootCAs: trusted, ServerName: name}
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func check(name string, facts ...bool) {
	for _, fact := range facts {
		if !fact {
			log.Fatalf("%s failed: %v", name, facts)
		}
	}
	fmt.Println("ok", name)
}

func request(change func(*pb.GenerateTextRequest)) *pb.GenerateTextRequest {
	asked := &pb.GenerateTextRequest{
		Input:     &pb.GenerateTextRequest_Prompt{Prompt: "def main("},
		MaxTokens: proto.Int32(16),
		Sampling:  &pb.SamplingParams{Temperature: proto.Float64(0)},
	}
	if change != nil {
		change(asked)
	}
	return asked
}

// read streams a whole text, and returns it with its last message.
func read(
	ctx context.Context, client pb.GenerationServiceClient, asked *pb.GenerateTextRequest,
) (text string, last *pb.GenerateTextResponse, err error) {
	stream, err := client.GenerateText(ctx, asked)
	for err == nil {
		var part *pb.GenerateTextResponse
		if part, err = stream.Recv(); err == nil {
			text, last = text+part.Text, part
		}
	}
	if err == io.EOF {
		err = nil
	}
	return
}

// Failure is a status with the details that every Outrider error has.
type Failure struct {
	Code  codes.Code
	Info  *errdetails.ErrorInfo
	Bad   *errdetails.BadRequest
	Retry *errdetails.RetryInfo
}

func explain(err error) (failure Failure) {
	failure.Code = status.Code(err)
	for _, detail := range status.Convert(err).Details() {
		switch found := detail.(type) {
		case *errdetails.ErrorInfo:
			failure.Info = found
		case *errdetails.BadRequest:
			failure.Bad = found
		case *errdetails.RetryInfo:
			failure.Retry = found
		}
	}
	return
}

// patient reads a text. It tries again as the error's retry rule and RetryInfo say, and returns the
// text and the number of tries, which is at most `most`.
func patient(
	ctx context.Context, client pb.GenerationServiceClient, asked *pb.GenerateTextRequest, most int,
) (text string, tries int, err error) {
	backoff := 100 * time.Millisecond
	for tries = 1; ; tries++ {
		text, _, err = read(ctx, client, asked)
		failure := explain(err)
		rule := failure.Info.GetMetadata()["retry"]
		if err == nil || tries == most || rule == "" || rule == "never" {
			return
		}
		wait := backoff
		if failure.Retry != nil {
			wait = failure.Retry.RetryDelay.AsDuration()
		}
		time.Sleep(wait)
		if backoff *= 2; backoff > 2*time.Second {
			backoff = 2 * time.Second
		}
	}
}

func main() {
	// A verifier's certificate has the name verifier.outrider, not that of its host.
	gateway, verifier := channel(os.Args[1], ""), channel(os.Args[2], "verifier.outrider")
	unavailable := channel(os.Args[3], "")
	text, ctx := pb.NewGenerationServiceClient(gateway), context.Background()

	// Stream a text. The last message has the token counts and the finish reason.
	whole, last, err := read(ctx, text, request(nil))
	must(err)
	check("stream", whole != "", last.Usage.CompletionTokenCount == 16)

	// Cancel a call. The server frees everything that the call held.
	cancelled, cancel := context.WithCancel(ctx)
	endless := request(func(r *pb.GenerateTextRequest) { r.MaxTokens = proto.Int32(1000) })
	stream, err := text.GenerateText(cancelled, endless)
	must(err)
	for err == nil {
		_, err = stream.Recv()
		cancel()
	}
	check("cancel", status.Code(err) == codes.Canceled)

	// Set a deadline. The server stops at it as well.
	short, done := context.WithTimeout(ctx, 50*time.Millisecond)
	long := request(func(r *pb.GenerateTextRequest) { r.MaxTokens = proto.Int32(1900) })
	_, _, err = read(short, text, long)
	done()
	check("deadline", status.Code(err) == codes.DeadlineExceeded)

	// Send bad input. The error has the reason and the field at fault.
	hot := request(func(r *pb.GenerateTextRequest) { r.Sampling.Temperature = proto.Float64(9) })
	_, _, err = read(ctx, text, hot)
	found := explain(err)
	check("bad-value", found.Code == codes.InvalidArgument,
		found.Info.Domain == "outrider.dev", found.Info.Reason == "INVALID_VALUE",
		found.Bad.FieldViolations[0].Field == "sampling.temperature")
	_, _, err = read(ctx, text, request(func(r *pb.GenerateTextRequest) { r.Model = "no-such-model" }))
	found = explain(err)
	check("unknown-model", found.Code == codes.NotFound, found.Info.Reason == "MODEL_NOT_FOUND")

	// Call a gateway without a verifier twice. RetryInfo says when to try again.
	began := time.Now()
	_, tries, err := patient(ctx, pb.NewGenerationServiceClient(unavailable), request(nil), 2)
	found = explain(err)
	delay := found.Retry.RetryDelay.AsDuration()
	check("unavailable", found.Code == codes.Unavailable, tries == 2, delay > 0, time.Since(began) >= delay)

	// Use gRPC's health and reflection services. The servers also have reflection v1, which this
	// version of gRPC lacks.
	asked := &grpc_health_v1.HealthCheckRequest{Service: "outrider.v1.GenerationService"}
	health, err := grpc_health_v1.NewHealthClient(gateway).Check(ctx, asked)
	must(err)
	check("health", health.Status == grpc_health_v1.HealthCheckResponse_SERVING)
	reflector := grpc_reflection_v1alpha.NewServerReflectionClient(gateway)
	reflection, err := reflector.ServerReflectionInfo(ctx)
	must(err)
	must(reflection.Send(&grpc_reflection_v1alpha.ServerReflectionRequest{
		MessageRequest: &grpc_reflection_v1alpha.ServerReflectionRequest_ListServices{}}))
	listed, err := reflection.Recv()
	must(err)
	served := false
	for _, service := range listed.GetListServicesResponse().Service {
		served = served || service.Name == "outrider.v1.GenerationService"
	}
	check("reflection", served)

	// Generate token ids at the verifier. A seed has 64 bits.
	var drawn [2][]uint32
	tokens := pb.NewVerifierServiceClient(verifier)
	for i := range drawn {
		stream, err := tokens.GenerateTokens(ctx, &pb.GenerateTokensRequest{
			PromptTokenIds: []uint32{1, 2, 3}, MaxTokens: 8, IgnoreEos: true,
			Sampling: &pb.SamplingParams{Seed: proto.Uint64(math.MaxUint64)},
		})
		must(err)
		for part, err := stream.Recv(); err != io.EOF; part, err = stream.Recv() {
			must(err)
			drawn[i] = append(drawn[i], part.TokenIds...)
		}
	}
	check("tokens", len(drawn[0]) == 8, reflect.DeepEqual(drawn[0], drawn[1]))
}
