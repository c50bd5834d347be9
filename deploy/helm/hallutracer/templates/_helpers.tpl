{{- define "hallutracer.fullname" -}}
{{- if contains "hallutracer" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-hallutracer" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end -}}
{{- end }}

{{- /* The name is fixed: Prometheus finds the pods by it, and the alerts look for the job of this name. */ -}}
{{- define "hallutracer.selector" -}}
app.kubernetes.io/name: hallutracer
app.kubernetes.io/component: service
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "hallutracer.labels" -}}
{{ include "hallutracer.selector" . }}
app.kubernetes.io/part-of: hallutracer
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "hallutracer.engine" -}}
{{- .Values.options.engine | default "transformers" -}}
{{- end }}

{{- define "hallutracer.image" -}}
{{- $kind := "" -}}
{{- if eq (include "hallutracer.engine" .) "vllm" }}{{ $kind = "-vllm" }}{{ else if .Values.gpus }}{{ $kind = "-cuda" }}{{ end -}}
{{ .Values.image.repository }}{{ if .Values.image.digest }}@{{ .Values.image.digest }}{{ else }}:{{ .Values.image.tag | default (printf "%s%s" .Chart.AppVersion $kind) }}{{ end }}
{{- end }}

{{- /* An option's value as its variable has it.  Helm reads numbers as floats: 4194304 would become 4.194304e+06. */ -}}
{{- define "hallutracer.value" -}}
{{- if kindIs "slice" . }}{{ join " " . }}
{{- else if kindIs "float64" . }}{{ if eq (floor .) . }}{{ int64 . }}{{ else }}{{ . }}{{ end }}
{{- else }}{{ . }}{{ end -}}
{{- end }}

{{- define "hallutracer.volume" -}}
{{- if .spec.claim }}
persistentVolumeClaim: {claimName: {{ .name }}}
{{- else }}
emptyDir: {sizeLimit: {{ .spec.size }}}
{{- end }}
{{- end }}
