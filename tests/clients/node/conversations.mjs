// What the tests ask, as in conversations.py, and where the server is.
export const BASE_URL = `${process.env.INFLIGHT_CLIENT_TESTS_URL}/v1`;
export const API_KEY = process.env.INFLIGHT_CLIENT_TESTS_KEY;
export const MODEL = "embedded";
export const SUM = "What is 7 + 5?";
export const SUM_ANSWER = "7 + 5 = 12";
export const STORY = "Tell me a long story about a fox named Anna in the forest.";
export const EXTRACT = "Extract name and age as JSON: Mia is 34 years old and lives in Oslo.";
export const PERSON = { name: "Mia", age: 34 };
export const WEATHER_QUESTION = "What is the weather in Oslo?";
export const WEATHER_DESCRIPTION = "Get the weather in a city";
export const WEATHER_CALL = { city: "Oslo" };
export const WEATHER_RESULT = { temperature: 21, condition: "sunny" };
export const WEATHER_ANSWER = "It is 21 degrees and sunny in Oslo.";
export const TOO_LONG = "What is 7 + 5? ".repeat(600);

export const user = (content) => ({ role: "user", content });
export const longHistory = () => [
  ...Array.from({ length: 45 }, () => [user(SUM), { role: "assistant", content: SUM_ANSWER }]).flat(),
  user(SUM),
];
