{{- define "walpost.name" -}}
{{- if contains "walpost" .Release.Name -}}
{{- .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-walpost" .Release.Name | trunc 53 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "walpost.selector" -}}
app.kubernetes.io/name: walpost
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "walpost.labels" -}}
{{ include "walpost.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "walpost.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "walpost.name" .) -}}
{{- end -}}
