//go:build !grpc_before_1_63

// Package dial makes a gRPC channel with the function that the installed version of gRPC has.
package dial

import (
	"crypto/tls"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"
)

// New returns a channel to host:port, without TLS if security is nil.
func New(address string, security *tls.Config, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	transport := insecure.NewCredentials()
	if security != nil {
		transport = credentials.NewTLS(security)
	}
	first := grpc.WithTransportCredentials(transport)
	return grpc.NewClient(address, append([]grpc.DialOption{first}, options...)...)
}
