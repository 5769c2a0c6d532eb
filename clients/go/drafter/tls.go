package drafter

import (
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"os"
	"strings"
)

// verifierName is the name in the certificate of every verifier.
const verifierName = "verifier.outrider"

// Files reads the PEM files of mutual TLS: this drafter's certificate, its key, and the authorities
// that sign the verifier's certificate.
func Files(cert, key, authorities string) (*tls.Config, error) {
	own, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, err
	}
	pem, err := os.ReadFile(authorities)
	if err != nil {
		return nil, err
	}
	trusted := x509.NewCertPool()
	if !trusted.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("%s holds no PEM certificates", authorities)
	}
	return &tls.Config{Certificates: []tls.Certificate{own}, RootCAs: trusted, ServerName: verifierName}, nil
}

// ownID returns the drafter's id, which with TLS begins with the common name of its certificate.
func (c Config) ownID() (string, error) {
	if c.TLS == nil {
		return c.ID, nil
	}
	own, err := x509.ParseCertificate(c.TLS.Certificates[0].Certificate[0])
	if err != nil {
		return "", err
	}
	name := own.Subject.CommonName
	if c.ID == name || strings.HasPrefix(c.ID, name+"/") {
		return c.ID, nil
	}
	return name + "/" + c.ID, nil
}
