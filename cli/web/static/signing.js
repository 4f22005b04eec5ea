// What a key signs is worked out here, from the very text that is on the screen: were another text shown than the one
// that is asked about, the server would see the signature of another request.

const UTF8 = new TextEncoder();

export function base64url(bytes) {
  const text = String.fromCharCode(...new Uint8Array(bytes));
  return btoa(text).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

export function bytes(text) {
  return Uint8Array.from(atob(text.replaceAll("-", "+").replaceAll("_", "/")), (letter) => letter.charCodeAt(0));
}

export async function sha256(data) {
  return crypto.subtle.digest("SHA-256", typeof data === "string" ? UTF8.encode(data) : data);
}

export async function hex(data) {
  return [...new Uint8Array(await sha256(data))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function checkCode(digest) {
  return digest.slice(0, 20).toUpperCase().match(/.{4}/g).join("-");
}

// One way to write a value: keys by code point, no spaces. A text that is written in another way could say one thing to
// whoever reads it and another to whoever signs it.
export function canonical(value) {
  if (Array.isArray(value)) return `[${value.map(canonical).join(",")}]`;
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const names = Object.keys(value).sort((one, other) => compare([...one], [...other]));
  return `{${names.map((name) => `${JSON.stringify(name)}:${canonical(value[name])}`).join(",")}}`;
}

function compare(one, other) {
  for (let at = 0; at < Math.min(one.length, other.length); at++) {
    const by = one[at].codePointAt(0) - other[at].codePointAt(0);
    if (by) return by;
  }
  return one.length - other.length;
}

export function parsed(text) {
  const value = JSON.parse(text);
  if (canonical(value) !== text) throw new Error("The text that is to be signed is not written in the one way that counts.");
  return value;
}

export async function decisionChallenge(request, verdict) {
  const decision = canonical({ kind: "approval-decision", request: await hex(request), v: 1, verdict });
  return sha256(`amends/approval/1\0${decision}`);
}

export async function eventChallenge(event) {
  return sha256(`amends/keyring/1\0${event}`);
}

// ---- the browser's part ----

export function unavailable() {
  if (!window.isSecureContext || !navigator.credentials || !window.PublicKeyCredential) {
    return "This browser lets no page of this address use keys.";
  }
  return "";
}

const WORDS = {
  NotAllowedError: "No key signed: nobody touched one, it was the wrong one, or it was cancelled. Nothing was sent.",
  AbortError: "It was given up. Nothing was sent.",
  SecurityError: "The browser lets this address use no keys. Open the link that `amends ui` prints, as it is.",
  InvalidStateError: "This key is enrolled already.",
  NotSupportedError: "This key can make none of the signatures that the keyring allows.",
};

export class Unsigned extends Error {
  constructor(error) {
    super(WORDS[error.name] || `The browser says: ${error.message}. Nothing was sent.`);
    this.next = "";
    this.code = error.name;
  }
}

// A proof of one of these keys over a challenge.
export async function sign(challenge, ids, rpId, timeout, signal) {
  let made;
  try {
    made = await navigator.credentials.get({
      publicKey: {
        challenge, rpId, userVerification: "required", timeout: Math.max(1, Math.min(60000, timeout)),
        allowCredentials: ids.map((id) => ({ type: "public-key", id: bytes(id) })),
      },
      signal,
    });
  } catch (error) {
    throw new Unsigned(error);
  }
  return {
    kind: "webauthn",
    credential: made.id,
    client_data: base64url(made.response.clientDataJSON),
    authenticator_data: base64url(made.response.authenticatorData),
    signature: base64url(made.response.signature),
  };
}

// A new key, as `options` of the server ask for it. What the key says of itself is sent; nothing that a page makes of it.
export async function create(options, signal) {
  let made;
  try {
    made = await navigator.credentials.create({
      publicKey: {
        ...options,
        challenge: bytes(options.challenge),
        user: { ...options.user, id: bytes(options.user.id) },
        excludeCredentials: options.excludeCredentials.map((one) => ({ ...one, id: bytes(one.id) })),
      },
      signal,
    });
  } catch (error) {
    throw new Unsigned(error);
  }
  return { client_data: base64url(made.response.clientDataJSON), authenticator_data: base64url(made.response.getAuthenticatorData()) };
}
