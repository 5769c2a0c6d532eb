//go:build grpc_before_1_63

// Package dial makes a gRPC channel with the function that the installed version of gRPC has. This
// file is for the version of Debian 12, which lacks grpc.NewClient.
package dial

import (
	"crypto/tls"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
)

// New returns a channel to host:port, without TLS if security is nil.
func New(address string, security *tls.Config, options ...grpc.DialOption) (*grpc.ClientConn, error) {
	first := grpc.WithInsecure()
	if security != nil {
		first = grpc.WithTransportCredentials(credentials.NewTLS(security))
	}
	return grpc.Dial(address, append([]grpc.DialOption{first}, options...)...)
}
