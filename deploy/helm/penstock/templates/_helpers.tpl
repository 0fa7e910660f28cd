{{/* The begin of all resource names. With a model's name (at most 20 characters), it must fit into labels
that Kubernetes makes of it. */}}
{{- define "penstock.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 28 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 28 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 28 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "penstock.routerName" -}}
{{- include "penstock.fullname" . }}-router
{{- end -}}

{{/* Labels that never change, for selectors. Called with "root" and optionally "component" (router, shard
or shard-worker) and "model". */}}
{{- define "penstock.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .model }}
model: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "penstock.labels" -}}
{{ include "penstock.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- with include "penstock.ownLabels" (dict "where" "commonLabels" "labels" .root.Values.commonLabels) }}
{{ . }}
{{- end }}
{{- end -}}

{{/* Labels in the values. Fails for labels that the chart sets itself. Called with "labels" and "where",
the name of the value. */}}
{{- define "penstock.ownLabels" -}}
{{- range $name, $_ := .labels -}}
{{- if or (eq $name "model") (has $name (list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "app.kubernetes.io/version" "app.kubernetes.io/managed-by" "helm.sh/chart")) -}}
{{- fail (printf "%s: the label %s is set by the chart; choose another name" $.where $name) -}}
{{- end -}}
{{- end -}}
{{- with .labels }}{{ toYaml . }}{{ end -}}
{{- end -}}

{{/* A pod's labels and annotations. Called with "root", "settings" (of the router or a model), "selector"
(the labels that select the pod) and "where", the name of the settings. */}}
{{- define "penstock.podMetadata" -}}
{{- $labels := mergeOverwrite (deepCopy (.root.Values.commonLabels | default dict)) (.settings.podLabels | default dict) -}}
labels:
  {{- .selector | nindent 2 }}
  {{- with include "penstock.ownLabels" (dict "where" (printf "%s.podLabels" .where) "labels" $labels) }}
  {{- . | nindent 2 }}
  {{- end }}
{{- with .settings.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Fields that pods of routers and shards share. Called with "root" and "settings". */}}
{{- define "penstock.podSettings" -}}
automountServiceAccountToken: false
{{- with .root.Values.serviceAccount.name | default (ternary (include "penstock.fullname" .root) "" .root.Values.serviceAccount.create) }}
serviceAccountName: {{ . | quote }}
{{- end }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.podSecurityContext }}
securityContext:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.initContainers }}
initContainers:
  {{- include "penstock.moreContainers" (dict "containers" . "settings" $.settings) | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Containers in the values; without a securityContext, they get that of the chart's containers. */}}
{{- define "penstock.moreContainers" -}}
{{- $containers := list -}}
{{- range .containers -}}
{{- $containers = append $containers (ternary . (set (deepCopy .) "securityContext" $.settings.securityContext) (hasKey . "securityContext")) -}}
{{- end -}}
{{- toYaml $containers -}}
{{- end -}}

{{/* Called with "image" of the values, and the default "tag". */}}
{{- define "penstock.image" -}}
{{- if .image.digest -}}
{{- printf "%s@%s" .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" .image.repository (.image.tag | default .tag) -}}
{{- end -}}
{{- end -}}

{{/* An entry of a container's env with a secret value; empty if no secret is named. Called with
(dict "name" "HF_TOKEN" "secret" .Values.shard.hubToken). */}}
{{- define "penstock.secretEnv" -}}
{{- if .secret.existingSecret }}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret.existingSecret | quote }}
      key: {{ .secret.key | quote }}
{{- end }}
{{- end -}}

{{/* The name of the secret that the chart makes for the shards' key. Empty if it makes none, because a
secret is named, clients need no key, or shards require the router's certificate. */}}
{{- define "penstock.ownShardKey" -}}
{{- $given := or .Values.shardApiKey.existingSecret .Values.apiKey.existingSecret -}}
{{- $mutual := and .Values.shardTls.existingSecret .Values.shardTls.mutual -}}
{{- if and .Values.apiKeysFile.existingSecret (not (or $given $mutual)) -}}
{{- include "penstock.fullname" . }}-shard-key
{{- end -}}
{{- end -}}

{{/* The name of the secret that the chart makes for the routers' resume key; empty if it makes none. */}}
{{- define "penstock.ownResumeKey" -}}
{{- if and (not .Values.resumeKey.existingSecret) (gt (int (include "penstock.mostRouters" .)) 1) -}}
{{- include "penstock.fullname" . }}-resume-key
{{- end -}}
{{- end -}}

{{/* The secret with resumeKey, as JSON: named in the values, or made by the chart. */}}
{{- define "penstock.resumeKey" -}}
{{- $own := include "penstock.ownResumeKey" . -}}
{{- if $own -}}
{{- dict "existingSecret" $own "key" "resume-key" | toJson -}}
{{- else -}}
{{- toJson .Values.resumeKey -}}
{{- end -}}
{{- end -}}

{{/* A secret with a key that the installation makes and upgrades keep. Called with "root", "name" and
"key". */}}
{{- define "penstock.madeSecret" -}}
{{- $kept := lookup "v1" "Secret" .root.Release.Namespace .name -}}
apiVersion: v1
kind: Secret
metadata:
  name: {{ .name | quote }}
  labels:
    {{- include "penstock.labels" (dict "root" .root) | nindent 4 }}
type: Opaque
data:
  {{ .key }}: {{ dig "data" .key "" $kept | default (randAlphaNum 48 | b64enc) | quote }}
{{- end -}}

{{/* The secret with shardApiKey, as JSON: named in the values, or made by the chart. */}}
{{- define "penstock.shardKey" -}}
{{- $own := include "penstock.ownShardKey" . -}}
{{- if $own -}}
{{- dict "existingSecret" $own "key" "shard-api-key" | toJson -}}
{{- else -}}
{{- toJson .Values.shardApiKey -}}
{{- end -}}
{{- end -}}

{{/* The placement of pods. Called with (dict "settings" .Values.router "selector" LABELS). */}}
{{- define "penstock.placement" -}}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - labelSelector:
      matchLabels:
        {{- $.selector | nindent 8 }}
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end -}}
