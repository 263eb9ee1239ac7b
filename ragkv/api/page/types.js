/**
 * The types of the API's responses that the page reads. Nothing here runs.
 *
 * @typedef {{number: number, document_id: string, source: string, title: string|null, text: string, start:
 *   number, end: number, page?: number|null, score: number}} Source
 * @typedef {{number: number, start: number, end: number, answer_start?: number|null, answer_end?: number|null,
 *   document_id: string, page?: number|null}} Citation
 * @typedef {{kind: string, start: number, tokens: number, state: "exact"|"fused"|"computed", recomputed: number,
 *   recomputed_at: number[], number: number|null, why?: string|null}} Span
 * @typedef {{exact: number, fused: number, recomputed: number, computed: number, missed_chunks: number, ratio: number,
 *   selector: string, notes: string[]}} Reuse
 * @typedef {{queue_s: number, lookup_s: number, load_s: number, fuse_s: number, prefill_s: number,
 *   first_token_s: number,
 *   decode_s: number}} Timing
 * @typedef {{id: string, answer: string, finish_reason: string, citations: Citation[], sources: Source[], reuse: Reuse,
 *   timing: Timing, prompt: Span[], session_id: string|null}} Answer
 */
export {};
