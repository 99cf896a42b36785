// Reads Kubernetes manifests from standard input and fails unless each is one that the API's own types take, with no field
// that they do not know. Prints "<kind> <name>" for each.
package main

import (
	"bytes"
	"fmt"
	"io"
	"os"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"
)

var kinds = map[string]func() meta.Object{
	"v1 ConfigMap":                            func() meta.Object { return &core.ConfigMap{} },
	"v1 Service":                              func() meta.Object { return &core.Service{} },
	"v1 ServiceAccount":                       func() meta.Object { return &core.ServiceAccount{} },
	"apps/v1 Deployment":                      func() meta.Object { return &apps.Deployment{} },
	"networking.k8s.io/v1 NetworkPolicy":      func() meta.Object { return &networking.NetworkPolicy{} },
	"policy/v1 PodDisruptionBudget":           func() meta.Object { return &policy.PodDisruptionBudget{} },
	"monitoring.coreos.com/v1 ServiceMonitor": func() meta.Object { return &monitoring.ServiceMonitor{} },
}

func main() {
	input, err := io.ReadAll(os.Stdin)
	if err != nil {
		fail("read: %v", err)
	}
	for _, text := range bytes.Split(append([]byte("\n"), input...), []byte("\n---\n")) {
		var kind meta.TypeMeta
		if err := yaml.Unmarshal(text, &kind); err != nil {
			fail("no YAML: %v\n%s", err, text)
		}
		if kind.Kind == "" {
			continue
		}
		known := kinds[kind.APIVersion+" "+kind.Kind]
		if known == nil {
			fail("unknown kind: %s %s", kind.APIVersion, kind.Kind)
		}
		object := known()
		if err := yaml.UnmarshalStrict(text, object); err != nil {
			fail("%s: %v\n%s", kind.Kind, err, text)
		}
		fmt.Println(kind.Kind, object.GetName())
	}
}

func fail(format string, arguments ...any) {
	fmt.Fprintf(os.Stderr, format+"\n", arguments...)
	os.Exit(1)
}
