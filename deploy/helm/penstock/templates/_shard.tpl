{{/* The template of a shard's pods. Called with (dict "root" $ "model" MODEL "component" "shard"). If
several pods share a model, the first is the shard, which answers; the others are of component
shard-worker, without ports and probes. */}}
{{- define "penstock.shardPod" -}}
{{- $values := .root.Values -}}
{{- $model := .model -}}
{{- $answers := eq .component "shard" -}}
{{- $ofVllm := eq $model.engine "vllm" -}}
{{- $shm := include "penstock.sharedMemory" $model -}}
{{- $selector := include "penstock.selector" (dict "root" .root "component" .component "model" $model.name) -}}
metadata:
  {{- include "penstock.podMetadata" (dict "root" .root "settings" $model "selector" $selector "where" (printf "models, %s: shard" $model.name)) | nindent 2 }}
spec:
  {{- include "penstock.podSettings" (dict "root" .root "settings" $model) | nindent 2 }}
  {{- if $ofVllm }}
  # A service named vllm would set VLLM_PORT, which vLLM reads.
  enableServiceLinks: false
  {{- end }}
  # No preStop is needed: at SIGTERM, the shard drains and tells the router over an open call.
  terminationGracePeriodSeconds: {{ add $model.drainTimeoutSeconds 15 }}
  {{- with $model.runtimeClassName }}
  runtimeClassName: {{ . | quote }}
  {{- end }}
  containers:
    - name: shard
      image: {{ include "penstock.image" (dict "image" $model.image "tag" (include "penstock.shardTag" .)) | quote }}
      imagePullPolicy: {{ $model.image.pullPolicy }}
      {{- with $model.securityContext }}
      securityContext:
        {{- toYaml . | nindent 8 }}
      {{- end }}
      args:
        {{- include "penstock.shardArgs" . | nindent 8 }}
      {{- with include "penstock.shardEnv" . | trim }}
      env:
        {{- . | nindent 8 }}
      {{- end }}
      {{- if $answers }}
      ports:
        - name: grpc
          containerPort: 50051
        - name: metrics
          containerPort: 9464
      # The open port answers NOT_SERVING until the model is loaded.
      startupProbe:
        {{- include "penstock.shardProbe" (dict "root" .root "service" "") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ max 1 (div ($model.startupSeconds | default (ternary 3600 1800 $ofVllm)) 5) }}
      readinessProbe:
        {{- include "penstock.shardProbe" (dict "root" .root "service" "") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      # A shard is alive if its server answers. It must not be killed while it is NOT_SERVING
      # because it drains or restarts a dead engine. If it gives up, it ends itself.
      livenessProbe:
        {{- include "penstock.shardProbe" (dict "root" .root "service" "live") | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      {{- end }}
      resources:
        {{- include "penstock.shardResources" . | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        {{- if $shm }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
        - name: cache
          mountPath: /var/cache/penstock
        {{- if $values.shardTls.existingSecret }}
        - name: tls
          mountPath: /etc/penstock/tls
          readOnly: true
        {{- end }}
        {{- with $model.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
    {{- with $model.extraContainers }}
    {{- include "penstock.moreContainers" (dict "containers" . "settings" $model) | nindent 4 }}
    {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- with $shm }}
    # A pod's processes exchange tensors here.
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ . }}
    {{- end }}
    {{- with $model.cache }}
    {{- if eq .type "emptyDir" }}
    - name: cache
      emptyDir:
        sizeLimit: {{ .size }}
    {{- else if eq .type "existing" }}
    - name: cache
      persistentVolumeClaim:
        claimName: {{ .existingClaim | quote }}
    {{- end }}
    {{- end }}
    {{- with $values.shardTls.existingSecret }}
    - name: tls
      secret:
        secretName: {{ . | quote }}
        defaultMode: 0440
    {{- end }}
    {{- with $model.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- with include "penstock.placement" (dict "settings" $model "selector" $selector) | trim }}
  {{- . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "penstock.shardTag" -}}
{{- $ofPenstock := ternary "cuda" "cpu" (gt (int .model.gpus) 0) -}}
{{- printf "%s-%s" .root.Chart.AppVersion (ternary "vllm" $ofPenstock (eq .model.engine "vllm")) -}}
{{- end -}}

{{/* The size of /dev/shm; empty for the runtime's default. Called with a model. */}}
{{- define "penstock.sharedMemory" -}}
{{- $several := ternary "1Gi" "" (gt (int .gpus) 1) -}}
{{- .sharedMemory | default (ternary "8Gi" $several (eq .engine "vllm")) -}}
{{- end -}}

{{- define "penstock.shardArgs" -}}
{{- $tls := .root.Values.shardTls -}}
- --drain-timeout-s
- {{ .model.drainTimeoutSeconds | quote }}
- --metrics-port
- "9464"
{{- with .model.model }}
- --model
- {{ . | quote }}
{{- end }}
{{- if eq .model.engine "vllm" }}
- --engine
- vllm
- --engine-python
- {{ .model.enginePython | quote }}
{{- range $name, $value := .model.engineArgs }}
- --engine-arg
- {{ printf "%s=%s" $name (toJson $value) | quote }}
{{- end }}
{{- end }}
{{- with .model.servedNames }}
- --served-model-name
{{- range . }}
- {{ . | quote }}
{{- end }}
{{- end }}
{{- if gt (int .model.totalGpus) 1 }}
- --tensor-parallel-size
- {{ .model.totalGpus | quote }}
{{- end }}
{{- if gt (int .model.nodes) 1 }}
- --nnodes
- {{ .model.nodes | quote }}
# The controller of LeaderWorkerSets (0.6 and later) sets these variables in each pod.
- --node-rank
- $(LWS_WORKER_INDEX)
- --master-addr
- $(LWS_LEADER_ADDRESS)
{{- end }}
{{- if $tls.existingSecret }}
- --tls-cert-file
- /etc/penstock/tls/tls.crt
- --tls-key-file
- /etc/penstock/tls/tls.key
{{- if $tls.mutual }}
- --tls-client-ca-file
- /etc/penstock/tls/ca.crt
{{- end }}
{{- end }}
{{- with .model.kvHostMemory }}
- --kv-host-bytes
- {{ . | quote }}
{{- end }}
{{- with include "penstock.peers" . | fromJsonArray }}
- --kv-peers
{{- range . }}
- {{ printf "%s:50051" .fullname | quote }}
{{- end }}
{{- if $tls.existingSecret }}
- --kv-peer-ca-file
- /etc/penstock/tls/ca.crt
- --kv-peer-server-name
- {{ include "penstock.shardServerName" $.root | quote }}
{{- end }}
- --role
- {{ $.model.role }}
{{- end }}
{{- range .model.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end -}}

{{/* Models with the same checkpoint, as JSON; their shards fetch KV blocks from each other. Empty without
copies or a key. */}}
{{- define "penstock.peers" -}}
{{- $peers := list -}}
{{- if and .model.kvHostMemory .root.Values.kvPeerKey.existingSecret -}}
{{- $model := .model.model -}}
{{- range include "penstock.models" .root | fromJsonArray -}}
{{- if and .kvHostMemory (eq .model $model) -}}
{{- $peers = append $peers . -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $peers -}}
{{- end -}}

{{- define "penstock.shardEnv" -}}
{{- $values := .root.Values -}}
{{- $key := include "penstock.shardKey" .root | fromJson -}}
{{- include "penstock.secretEnv" (dict "name" "PENSTOCK_API_KEY" "secret" (ternary $key $values.apiKey (not (empty $key.existingSecret)))) }}
{{- if include "penstock.peers" . | fromJsonArray }}
{{- include "penstock.secretEnv" (dict "name" "PENSTOCK_KV_PEER_KEY" "secret" $values.kvPeerKey) }}
{{- end }}
{{- include "penstock.secretEnv" (dict "name" "HF_TOKEN" "secret" .model.hubToken) }}
{{- with .model.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* A probe of the shard. The kubelet speaks no TLS over gRPC, so with TLS the image's own probe runs, with
the shard's certificate. */}}
{{- define "penstock.shardProbe" -}}
{{- $tls := .root.Values.shardTls -}}
{{- if $tls.existingSecret -}}
exec:
  command:
    - penstock
    - health
    {{- if eq .service "live" }}
    - --live
    {{- end }}
    - --timeout
    - "4"
    - --tls-ca-file
    - /etc/penstock/tls/ca.crt
    - --tls-server-name
    - {{ include "penstock.shardServerName" .root | quote }}
    {{- if $tls.mutual }}
    - --tls-cert-file
    - /etc/penstock/tls/tls.crt
    - --tls-key-file
    - /etc/penstock/tls/tls.key
    {{- end }}
    - 127.0.0.1:50051
{{- else -}}
grpc:
  port: 50051
  {{- with .service }}
  service: {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "penstock.shardResources" -}}
{{- $resources := deepCopy (.model.resources | default dict) -}}
{{- if gt (int .model.gpus) 0 -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict .model.gpuResource (int .model.gpus))) -}}
{{- end -}}
{{- toYaml $resources -}}
{{- end -}}
