// Sequences come as rows without names; this gives them their names.

/** Return the cluster's sequences as objects, each with its engine. */
export function sequencesOf(state) {
  const fields = state.model.row_fields;
  return state.cluster.sequences.map((row) => {
    const sequence = {};
    for (let index = 1; index < fields.length; index++) sequence[fields[index]] = row[index];
    sequence.engine = state.cluster.engines[row[0]];
    return sequence;
  });
}

export const addressOf = (sequence) =>
  `#sequence/${encodeURIComponent(sequence.engine.engine_id)}/${encodeURIComponent(sequence.request_id)}`;
