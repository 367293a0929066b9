{{- define "kvorum.fullname" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end }}
{{- end }}

{{- define "kvorum.selector" -}}
app.kubernetes.io/part-of: kvorum
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "kvorum.labels" -}}
{{ include "kvorum.selector" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{- define "kvorum.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- /* How long a router that Serve stops still answers, while Kubernetes sees that it is not ready and takes it out. */}}
{{- define "kvorum.leaveSeconds" -}}15{{- end }}

{{- /*
What Ray takes, after SIGTERM, to drain its node: Serve starts replicas elsewhere where it can, then those here finish
their requests (drain_timeout_s, but routers leaveSeconds and 5 at least) and end (engines take up to 8 s for it).
*/}}
{{- define "kvorum.drainSeconds" -}}
{{ add (max (add (ceil .Values.config.drain_timeout_s) 8) (add (include "kvorum.leaveSeconds" .) 5)) 7 }}
{{- end }}

{{- define "kvorum.gracePeriodSeconds" -}}
{{ add (include "kvorum.drainSeconds" .) 30 }}
{{- end }}

{{- /* Arguments of the application: everything that only new processes can take. */}}
{{- define "kvorum.args" -}}
{{- $args := omit .Values.config "tenants" }}
{{- $_ := set $args "host" "0.0.0.0" }}
{{- $_ := set $args "router_resource" "kvorum_router" }}
{{- with .Values.controlTLS.existingSecret }}{{ $_ := set $args "control_tls" "/etc/kvorum/control-tls" }}{{ end }}
{{- with .Values.apiKey.existingSecret }}{{ $_ := set $args "api_key_file" "/etc/kvorum/api-key/key" }}{{ end }}
{{- toYaml $args }}
{{- end }}

{{- /* What ClusterConfig checks when the application is built, but Serve hands over without building it. */}}
{{- define "kvorum.checkTenants" -}}
{{- $tenants := .Values.config.tenants | default dict }}
{{- if and $tenants .Values.apiKey.existingSecret }}
{{- fail "apiKey.existingSecret: with config.tenants, each has keys of its own (api_key_sha256)" }}
{{- end }}
{{- if and $tenants (eq (toString .Values.config.cache_manager) "false") }}
{{- fail "config.cache_manager: tenants have limits only with the cache manager" }}
{{- end }}
{{- $owners := dict }}
{{- range $name, $tenant := $tenants }}
{{- range ($tenant | default dict).api_key_sha256 }}
{{- if ne $name (get $owners . | default $name) }}
{{- fail (printf "config.tenants: %s and %s have the same API key" (get $owners .) $name) }}
{{- end }}
{{- $_ := set $owners . $name }}
{{- end }}
{{- end }}
{{- end }}

{{- /* Engines that a pod can hold: as its GPUs allow; of one that is larger than a pod, the first rank's pod. */}}
{{- define "kvorum.enginesPerPod" -}}
{{ max 1 (div (.group.gpus | default 0) .root.Values.config.tensor_parallel_size) }}
{{- end }}

{{- /* An engine for which there is no room would wait without a word. */}}
{{- define "kvorum.checkRoom" -}}
{{- $config := .Values.config }}
{{- $wanted := int ($config.max_engines | default $config.num_engines) }}
{{- $engines := 0 }}
{{- $gpus := 0 }}
{{- range .Values.engineGroups }}
{{- $pods := int (hasKey . "replicas" | ternary .replicas 1) }}
{{- if $.Values.autoscaling.enabled }}{{ $pods = int (.maxReplicas | default $pods) }}{{ end }}
{{- $engines = add $engines (mul $pods (include "kvorum.enginesPerPod" (dict "root" $ "group" .))) }}
{{- $gpus = add $gpus (mul $pods (.gpus | default 0)) }}
{{- end }}
{{- if gt $wanted (int $engines) }}
{{- fail (printf "engineGroups: their pods have room for %d of the %d engines that config asks for" $engines $wanted) }}
{{- end }}
{{- if and $gpus (gt (mul $wanted $config.tensor_parallel_size) $gpus) }}
{{- fail (printf "engineGroups: they have %d GPUs for %d engines with tensor_parallel_size %v" $gpus $wanted $config.tensor_parallel_size) }}
{{- end }}
{{- end }}

{{- define "kvorum.serveConfig" -}}
{{- include "kvorum.checkTenants" . -}}
{{- include "kvorum.checkRoom" . -}}
# Clients reach the routers' own ports. The proxy that Serve starts all the same stays alone on the head.
proxy_location: HeadOnly
http_options:
  host: 0.0.0.0
  port: {{ .Values.config.port }}
grpc_options:
  port: {{ .Values.config.grpc_port }}
  grpc_servicer_functions:
    - kvorum.protos.inference.v1.inference_pb2_grpc.add_InferenceServiceServicer_to_server
    - grpc_health.v1.health_pb2_grpc.add_HealthServicer_to_server
    - smg_grpc_proto.generated.vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server
applications:
  - name: kvorum
    import_path: kvorum.cluster.serve_app:build
    route_prefix: /
    args:
      {{- include "kvorum.args" . | nindent 6 }}
    deployments:
      - name: Router
        # Each pod has one pair of ports.
        max_replicas_per_node: 1
        user_config:
          tenants:
            {{- .Values.config.tenants | default dict | toYaml | nindent 12 }}
      - name: Engine
        ray_actor_options:
          num_cpus: 0
          resources:
            kvorum_engine: 1
{{- end }}

{{- /* What Ray and Serve read from the environment only: launcher.serve_environment, but for how routers and nodes stop. */}}
{{- define "kvorum.env" -}}
{{- $port := int .Values.config.port }}
{{- $grpcPort := int .Values.config.grpc_port }}
{{- $env := dict
  "PYTHONSAFEPATH" "1"
  "RAY_USAGE_STATS_ENABLED" "0"
  "RAY_SERVE_THROUGHPUT_OPTIMIZED" "1"
  "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP" "1"
  "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT" $port
  "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT" (add1 $port)
  "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT" $grpcPort
  "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT" (add1 $grpcPort)
  "RAY_SERVE_PORT_QUARANTINE_S" "0"
  "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE" "67108864"
  "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S" (include "kvorum.leaveSeconds" .)
  "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S" (include "kvorum.drainSeconds" .)
  "HF_HOME" "/models"
}}
{{- range $name, $value := $env }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with .Values.huggingFace }}
{{- if .existingSecret }}
- name: HF_TOKEN
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- with .Values.env }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kvorum.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end }}
